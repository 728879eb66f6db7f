"""Know how models write reasoning: one module per format, with its tags, grammar and parser."""
