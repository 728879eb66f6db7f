"""Transcribe recordings and live speech: windows, stitching, word times."""
