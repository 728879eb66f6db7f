"""The `motet` command: starts the stack on one machine, and talks to it from a terminal."""
