"""Run denoisers on Motet's kernels: fused layers, packed convolutions, guidance."""
