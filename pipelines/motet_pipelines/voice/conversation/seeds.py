"""Choose the seeds of requests."""

from __future__ import annotations

from motet_pipelines import draws


def new_seed(name: str) -> int:
    """Return a seed for a whole request, by its unique name: a stream that fails over keeps its noise."""
    return draws.randbits(63, f"seed {name}")
