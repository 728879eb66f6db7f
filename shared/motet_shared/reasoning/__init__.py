"""Read and write models' reasoning: one module per format, with its tags, grammar and parser."""
