"""Statistics over rings: what the sidecar answers, computed from records."""
