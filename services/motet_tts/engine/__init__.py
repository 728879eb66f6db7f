"""Batch sentences through a speech model: the engine, its thread, and the sessions of texts."""
