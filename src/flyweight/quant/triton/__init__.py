"""Kernels of the solvers, in Triton: imported only where there is a GPU, or an interpreter in a
test.
"""
