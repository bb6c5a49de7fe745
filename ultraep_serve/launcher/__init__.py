"""Starting an engine's server with the sidecar beside it; imports no engine."""
