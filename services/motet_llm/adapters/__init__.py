"""Serve LoRA adapters: checkpoint folders, the bank of factors, the cache of loaded adapters."""
