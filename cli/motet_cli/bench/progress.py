"""Show the progress of a running benchmark on one line of a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator

from motet_cli.bench.load import LoadGenerator

_EVERY = 0.5  # seconds


@contextlib.contextmanager
def shown(load: LoadGenerator, requests: int | None) -> Iterator[None]:
    """Show progress on standard error within the context, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    task = asyncio.create_task(_draw(load, requests))
    try:
        yield
    finally:
        task.cancel()
        sys.stderr.write("\r\x1b[K")


async def _draw(load: LoadGenerator, requests: int | None) -> None:
    of = "" if requests is None else f" of {requests}"
    while True:
        sent = len(load.measured.records)
        line = f"{load.now():.0f} s: {sent - load.in_flight}{of} requests done, {load.in_flight} in flight"
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()
        await asyncio.sleep(_EVERY)
