"""Compute the parameters, memory and speed of models from their config.json."""
