"""Serve what belongs to no protocol: health, metrics, recent replies, heartbeats, adapters."""
