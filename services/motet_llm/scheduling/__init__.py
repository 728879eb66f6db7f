"""Decide which requests run in a step: continuous batching, fairness, step times."""
