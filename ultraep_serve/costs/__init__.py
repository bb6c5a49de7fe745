"""Costs: what a layer takes and when moving weights pays, decided in every batch from integers.

``model`` holds the costs, ``calibration`` measures them at start-up, ``decide`` uses them. What a
machine would gain, from data sheets or a trace, is in ``ultraep_serve.offline``.
"""
