"""Stretches of a sound that is read block by block: no more of it is held than a stretch may still need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from motet_shared.errors import BadRequest
from motet_shared.sound_file import RATE, Samples

Span = tuple[float, float]


def check(spans: Sequence[Span]) -> None:
    """BadRequest (param "spans") for what is no span, or out of order."""
    before = 0.0
    for start, end in spans:
        if not before <= start < end < np.inf:
            raise BadRequest(
                f"spans: ({start}, {end}) after {before}: give (beginning, end) in seconds, by their beginnings",
                param="spans",
            )
        before = start


def stretches(blocks: Iterable[Samples], spans: Sequence[Span], longest: float) -> Iterator[Samples]:
    """The samples of each span, at least one and at most `longest` seconds. BadRequest for one behind the end."""
    held, first, reader = np.zeros(0, np.float32), 0, iter(blocks)
    for start, end in spans:
        begin, finish = int(start * RATE), int(min(end, start + longest) * RATE)
        finish = max(finish, begin + 1)
        while first + len(held) < finish and (block := next(reader, None)) is not None:
            if begin > first:
                held, first = held[begin - first :], min(begin, first + len(held))
            held = np.concatenate([held, block])
        if first + len(held) <= begin:
            seconds = (first + len(held)) / RATE
            raise BadRequest(f"spans: ({start}, {end}) lies behind the end of the file, {seconds:.2f} s", param="spans")
        yield held[begin - first : finish - first]
