"""Prefill on other workers: the placement decision and the transfer of keys and values."""
