"""The lab: what predicts and measures. Nothing that serves imports it.

``trace`` holds routing, ``store`` reads and writes it, ``workloads`` generates it and ``captured``
takes it from a server. ``replay`` plans it with any policy of ``comparators``, and ``verdict`` says
what that would gain on one of ``machines``. ``bench`` measures a running server, and ``demo``
brings one with it.
"""
