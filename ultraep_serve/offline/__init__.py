"""What needs no server: traces, replay, comparators and advice.

``trace`` holds routing, ``store`` reads and writes it, ``workloads`` generates it and ``recorded``
takes it from a server. ``replay`` plans it with any policy of ``comparators``, and ``advice``
predicts what that would gain on named ``hardware``. ``simulation`` plans the ``traffic`` of many
groups at once.
"""
