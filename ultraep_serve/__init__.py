"""Real-time expert load balancing for Mixture-of-Experts serving.

Read ``balancer`` first: its ``route`` method is the whole data flow, one line per stage.
"""

__version__ = "0.1.0"
