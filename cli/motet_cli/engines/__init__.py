"""Choose the engine of each language model: Motet's own, another one, or a running server."""
