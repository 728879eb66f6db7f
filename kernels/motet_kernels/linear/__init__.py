"""Multiply by packed weights: plain, grouped, per head, in mixed formats, with LoRA adapters."""
