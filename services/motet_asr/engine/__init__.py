"""Batch windows of audio through a recognizer: the engine, its slots and its thread."""
