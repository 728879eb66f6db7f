"""Bound what connections may cost before their client is known: count, size and time."""
