"""Repeat requests that a busy hub has put off: status 429 with Retry-After, and 503."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from huggingface_hub.errors import HfHubHTTPError

T = TypeVar("T")
_STATUSES = (429, 503)
_ATTEMPTS = 4
_LONGEST_WAIT = 60.0  # seconds; a hub that names a longer time is given up at once


def retried(function: Callable[[], T]) -> T:
    """Return what `function` returns, called again after the time that the hub names.

    Raises HfHubHTTPError if it stays busy.
    """
    for attempt in range(1, _ATTEMPTS):
        try:
            return function()
        except HfHubHTTPError as error:
            wait = _wait(error, attempt)
            if wait is None or wait > _LONGEST_WAIT:
                raise
        time.sleep(wait)
    return function()


def _wait(error: HfHubHTTPError, attempt: int) -> float | None:
    """Return the seconds to wait before the next attempt; None: another would not help."""
    response = error.response
    if response is None or response.status_code not in _STATUSES:
        return None
    named = response.headers.get("Retry-After", "")
    return float(named) if named.isdecimal() else float(2**attempt)
