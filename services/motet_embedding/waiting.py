"""Texts that wait: one line per request, served in turn, so that a long request does not hold up a short one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from .texts import Text

Key = Hashable

_LOOK_AHEAD = 512  # texts among which those of like length are looked for


def cost(lengths: Sequence[int], *, packed: bool) -> int:
    """Tokens of a forward pass over texts of these lengths: unless they are packed, with padding."""
    return sum(lengths) if packed else len(lengths) * max(lengths, default=0)


class Waiting(NamedTuple):
    """The text at `place` of a request."""

    key: Key
    place: int
    text: Text


class Lines:
    """All that wait. A text leaves with `take`, or with its request's `cancel`."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Key, list[Waiting]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __contains__(self, key: Key) -> bool:
        return key in self._lines

    def add(self, key: Key, texts: Sequence[Text]) -> None:
        self._lines[key] = [Waiting(key, place, text) for place, text in enumerate(texts)]

    def cancel(self, key: Key) -> None:
        self._lines.pop(key, None)

    def take(self, most: int, *, packed: bool) -> list[Waiting]:
        """The texts of the next forward pass: the first one that waits, and company, with padding of about its length.

        No more than `most` tokens together, unless the first one alone has.
        """
        ahead = list(islice(self._in_turn(), _LOOK_AHEAD))
        if not ahead:
            return []
        first, *others = ahead
        if not packed:
            others.sort(key=lambda one: abs(len(one.text) - len(first.text)))
        taken, lengths = [first], [len(first.text)]
        for one in others:
            if cost([*lengths, len(one.text)], packed=packed) > most:
                break
            taken.append(one)
            lengths.append(len(one.text))
        self._remove(taken)
        return taken

    def _in_turn(self) -> Iterator[Waiting]:
        """The first of each line, then the second of each, …"""
        longest = max(map(len, self._lines.values()), default=0)
        for turn in range(longest):
            for line in self._lines.values():
                if turn < len(line):
                    yield line[turn]

    def _remove(self, taken: list[Waiting]) -> None:
        """Requests that were served go behind those that were not."""
        gone = {(one.key, one.place) for one in taken}
        for key in dict.fromkeys(one.key for one in taken):
            left = [one for one in self._lines.pop(key) if (key, one.place) not in gone]
            if left:
                self._lines[key] = left
