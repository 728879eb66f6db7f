"""Wait for what happens in another process or thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def until(condition: Callable[[], T], seconds: float = 20.0) -> T:
    """Return the first true value of `condition`. Raises TimeoutError if there is none in time."""
    async with asyncio.timeout(seconds):
        while not (value := condition()):  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.01)
        return value
