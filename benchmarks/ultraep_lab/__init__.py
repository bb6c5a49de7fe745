"""The lab: what predicts and measures. Nothing that serves imports it.

``trace`` holds routing, ``store`` reads and writes it, ``workloads`` generates it and ``captured``
takes it from a server. ``replay`` plans it with any policy of ``comparators``, and ``advise``
predicts what that would gain on named ``hardware``. ``simulate`` plans the traffic of many
groups at once, ``bench`` measures a running server, and ``demo`` brings one with it.
"""
