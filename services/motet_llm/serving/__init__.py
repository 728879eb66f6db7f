"""Serve the engine as an actor: shared worker code, remote prefill, profiling, role changes."""
