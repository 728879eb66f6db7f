"""Choose the seeds of requests."""

from __future__ import annotations

import secrets


def new_seed() -> int:
    """Return a seed for a whole request: a stream that fails over keeps its noise."""
    return secrets.randbits(63)
