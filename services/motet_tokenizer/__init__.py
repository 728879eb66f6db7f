"""Serve text for language models: own a request from text to text, without torch."""
