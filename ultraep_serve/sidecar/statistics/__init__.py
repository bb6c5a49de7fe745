"""The figures that the sidecar answers with, computed from records."""
