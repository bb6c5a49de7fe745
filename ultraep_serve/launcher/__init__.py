"""Starting an engine's server with the sidecar beside it; knows no engine."""
