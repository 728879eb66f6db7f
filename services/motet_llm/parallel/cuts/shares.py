"""Divide sizes among ranks."""

from __future__ import annotations

from dataclasses import dataclass

GRANULE = 32  # features that quantized formats scale together
LARGE = 4  # granules per rank from which on whole ones are balanced enough


@dataclass(frozen=True, slots=True)
class Share:
    """Hold the range of features, heads, experts or layers that is one rank's."""

    begin: int
    end: int

    @property
    def width(self) -> int:
        return self.end - self.begin


def divide(size: int, place: int, ranks: int) -> Share:
    """Return the share of the rank at `place`: as equal as possible, in whole granules if large.

    The same for every matrix of this size, so that outputs of one fit the inputs of the next.
    """
    step = GRANULE if size >= LARGE * GRANULE * ranks and not size % GRANULE else 1
    units = size // step
    return Share(units * place // ranks * step, units * (place + 1) // ranks * step)


def evenly(size: int, place: int, ranks: int) -> Share:
    """Return the share of the rank at `place` of what is a multiple of `ranks`."""
    width = size // ranks
    return Share(place * width, (place + 1) * width)


def key_heads(heads: int, place: int, ranks: int) -> Share:
    """Return the key/value heads of a rank; several ranks hold the same one if there are fewer.

    heads and ranks: one is a multiple of the other.
    """
    if heads >= ranks:
        return Share(heads * place // ranks, heads * (place + 1) // ranks)
    first = place * heads // ranks
    return Share(first, first + 1)
