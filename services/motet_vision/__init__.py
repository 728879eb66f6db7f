"""Encode pictures with the vision half of a checkpoint, apart from its language model."""
