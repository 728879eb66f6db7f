"""Divide a long list of texts into requests that fit into messages."""

from __future__ import annotations

from collections.abc import Sequence

PART = 256 * 1024  # most bytes of texts in one request, unless one text alone is larger
PART_TEXTS = 512  # most texts in one request


def part_end(lengths: Sequence[int], first: int) -> int:
    """Return the end of the texts from `first` on that fit into one request.

    lengths: characters or token ids of each text.
    """
    size, end = 0, first
    while end < len(lengths):
        # An upper bound of the bytes on the wire: 4 per character, and for most token ids.
        size += 4 * lengths[end] + 8
        if end > first and (size > PART or end - first == PART_TEXTS):
            break
        end += 1
    return end
