"""Implement the commands of `motet` that talk to a running server."""
