"""Costs: what a layer takes, measured at start-up (``calibration``) or given (``model``)."""
