"""Measure what parts of Motet cost and gain: one room a topic; README.md lists the benchmarks."""
