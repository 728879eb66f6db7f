"""Embed texts as vectors: sentence encoders of transformers, batched across requests."""
