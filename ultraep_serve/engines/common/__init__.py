"""What the adapters of all engines share; imports no engine."""
