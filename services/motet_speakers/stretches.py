"""Cut stretches from audio that is read block by block, holding only what later stretches need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from motet_media.sound_file import RATE, Samples
from motet_shared.errors import BadRequest

Span = tuple[float, float]


def check(spans: Sequence[Span]) -> None:
    """Raise BadRequest (param "spans") for invalid spans or spans out of order."""
    before = 0.0
    for start, end in spans:
        if not before <= start < end < np.inf:
            raise BadRequest(
                f"spans: ({start}, {end}) after {before}: give (beginning, end) in seconds, by their beginnings",
                param="spans",
            )
        before = start


def stretches(
    blocks: Iterable[Samples], spans: Sequence[Span], longest: float
) -> Iterator[Samples]:
    """Yield the samples of each span, at least one and at most `longest` seconds.

    Raises BadRequest for a span that begins after the end of the audio.
    """
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
            raise BadRequest(
                f"spans: ({start}, {end}) begins after the end of the file, {seconds:.2f} s; "
                "give spans within it",
                param="spans",
            )
        yield held[begin - first : finish - first]
