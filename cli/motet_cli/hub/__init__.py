"""Fetch released checkpoints by name from a model hub, through huggingface_hub and its cache."""
