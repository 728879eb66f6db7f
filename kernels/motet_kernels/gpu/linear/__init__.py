"""Multiply by packed weights and by adapters with Triton."""
