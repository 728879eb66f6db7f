"""Build the output of a response: its items, and the events that show them while they grow."""
