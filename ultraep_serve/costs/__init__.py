"""Costs: what a layer takes, measured at start-up (``calibration``) or given (``model``).

What a machine would gain, from data sheets or a trace, is in ``ultraep_serve.lab``.
"""
