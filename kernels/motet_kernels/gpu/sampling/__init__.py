"""Sample tokens with Triton."""
