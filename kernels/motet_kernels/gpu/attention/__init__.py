"""Compute attention, rotary embedding and the KV cache with Triton."""
