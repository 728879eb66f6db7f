"""Compute model layers: C++ kernels for the CPU, Triton kernels for GPUs, and a torch twin of each.

A twin is its kernel's test oracle, and the implementation where there is no compiler.
Importing this package is cheap: the native library is loaded, and built if it is in no cache, on
first use (`Kernel.native`).
"""
