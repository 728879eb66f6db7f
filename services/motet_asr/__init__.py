"""Transcribe speech: audio in, text with times out."""
