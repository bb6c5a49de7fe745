"""What is around an engine: its command, what is refused before, the sidecar's process."""
