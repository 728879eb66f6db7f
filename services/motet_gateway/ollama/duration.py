"""Read `keep_alive`: seconds, or a duration as Go writes it ("5m", "1h30m", "-1m")."""

from __future__ import annotations

import math
import re

from motet_shared.errors import BadRequest

FOREVER = -1.0
_UNITS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_PART = re.compile(r"(\d{1,15}(?:\.\d{0,9})?|\.\d{1,9})(ns|us|µs|ms|s|m|h)")
_WHOLE = re.compile(rf"[+-]?(?:{_PART.pattern})+")
_NUMBER = re.compile(r"[+-]?\d{1,15}(?:\.\d{0,9})?")
_LONGEST = 64  # characters


def seconds_of(given: float | str) -> float:
    """Return the seconds of a `keep_alive`; FOREVER for a negative one.

    Raises BadRequest for what is no duration.
    """
    seconds = _parsed(given) if isinstance(given, str) else given
    if seconds is None or not math.isfinite(seconds):
        message = f"`keep_alive` {given!r:.80} is no duration; send seconds, or a text such as '5m'"
        raise BadRequest(message, param="keep_alive")
    return FOREVER if seconds < 0 else seconds


def _parsed(text: str) -> float | None:
    if len(text) > _LONGEST:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    if not _WHOLE.fullmatch(text):
        return None
    total = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    return -total if text.startswith("-") else total
