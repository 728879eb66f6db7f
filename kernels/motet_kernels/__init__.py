"""Compute kernels: C++ for the CPU, and for each a torch twin, its oracle and its path where there is no compiler.

Importing this package costs nothing: the native library is loaded, and built if need be, on first use (`native`).
"""
