"""Choose what computes the language models of a stack: Motet's engine, or others in place or elsewhere."""
