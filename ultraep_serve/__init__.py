"""Real-time expert load balancing for Mixture-of-Experts serving.

Read ``balance.host.balancer`` first: its ``route`` method is the whole data flow, one line per
stage. What predicts and measures is in the package ``ultraep_lab``.
"""

__version__ = "0.1.0"
