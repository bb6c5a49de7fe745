"""Triton kernels of every stage; same results, bit for bit, as the CPU functions of the same names.

Every launcher has a static grid, allocates by shape alone and never reads back to the host, so all
of them can be captured in a CUDA graph. Import the submodules directly: nothing here loads Triton
for those who do not use it. ``TRITON_INTERPRET=1`` runs them all on host memory.
"""
