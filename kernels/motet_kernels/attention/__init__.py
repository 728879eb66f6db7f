"""Attend over paged and packed keys and values: the cache, its rows, and rotary embedding."""
