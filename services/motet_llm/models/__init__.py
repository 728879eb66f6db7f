"""Adapt transformers' models: recurrent mixers, fused layers, image embeddings, checks."""
