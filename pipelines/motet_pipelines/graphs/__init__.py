"""Declare pipelines as graphs of stages, and run them."""
