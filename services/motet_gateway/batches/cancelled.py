"""Notice a cancellation that a library has swallowed.

`asyncio.wait_for` of Python 3.11, which the client of NATS uses for each answer, drops a cancel
that comes together with the answer. A loop that awaits such calls would never end.
"""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Return True if the current task was cancelled, also if it did not notice."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
