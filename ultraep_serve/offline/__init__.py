"""Away from the server: traces, replay, comparators and advice.

``trace`` holds routing, ``store`` and ``parquet`` files of it, ``workloads`` makes some up and
``recorded`` takes it from a server; ``replay`` plans it under any policy of ``comparators``, and
``advice`` says what that would gain on named ``hardware``.
"""
