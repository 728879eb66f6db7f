"""Encode pictures and sound with the towers of a checkpoint, apart from its language model."""
