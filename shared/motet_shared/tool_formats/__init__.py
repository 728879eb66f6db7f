"""Know how models write tool calls: one module per format, with its tags, grammar and parser."""
