"""Kernels of ultraep_serve: every stage of the data flow twice, on the host and on a device.

``host`` holds what a CPU rank runs (numba), ``device`` the Triton kernels, under the same names and
with the same results, bit for bit. ``contract`` states what both, and their callers, agree on.
"""
