"""Read and write models' tool calls: one module per format, with its tags, grammar and parser."""
