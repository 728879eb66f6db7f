"""Provide the `motet` command: start a stack on one machine, and use it from a terminal."""
