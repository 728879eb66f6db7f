"""Compute one model by a group of ranks: tensor, expert and pipeline parallelism over gloo."""
