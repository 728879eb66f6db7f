"""Compute one model by a group of ranks on one host: tensor, expert and pipeline parallelism."""
