"""What SGLang imports on CPU from packages that have no CPU build beside it.

Text models never call most of it. ``launch.engine_command`` puts this directory on the path of the
server it starts, only with ``--device cpu`` and only behind real packages of the same names, which
therefore win.
"""
