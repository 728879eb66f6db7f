"""Queue texts by request, served round-robin: long requests do not delay short ones.

Texts of a lower priority wait for all of a higher one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from .texts import Text

Key = Hashable

_LOOK_AHEAD = 512  # texts among which similar lengths are searched


def cost(lengths: Sequence[int], *, packed: bool) -> int:
    """Return the tokens of a pass over texts of these lengths, with padding unless packed."""
    return sum(lengths) if packed else len(lengths) * max(lengths, default=0)


class WaitingText(NamedTuple):
    """Represent the text at `place` of a request that waits to be encoded."""

    key: Key
    place: int
    text: Text


class RequestQueues:
    """Hold all waiting texts.

    A text leaves with `take` or with its request's `cancel`.
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[Key, list[WaitingText]] = OrderedDict()
        self._priorities: dict[Key, int] = {}  # of the requests in `_queues`

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, key: Key) -> bool:
        return key in self._queues

    def add(self, key: Key, texts: Sequence[Text], priority: int = 0) -> None:
        """Queue the texts of a request."""
        self._priorities[key] = priority
        self._queues[key] = [WaitingText(key, place, text) for place, text in enumerate(texts)]

    def cancel(self, key: Key) -> None:
        """Drop the waiting texts of a request; unknown keys are ignored."""
        self._queues.pop(key, None)
        self._priorities.pop(key, None)

    def take(self, most: int, *, packed: bool) -> list[WaitingText]:
        """Remove and return the texts of the next forward pass.

        The first waiting text and others, without packing those of similar length; at most `most`
        tokens together, unless the first text alone has more.
        """
        ahead = list(islice(self._round_robin(), _LOOK_AHEAD))
        if not ahead:
            return []
        first, *others = ahead
        if not packed:
            others.sort(key=lambda first_text: abs(len(first_text.text) - len(first.text)))
        taken, lengths = [first], [len(first.text)]
        for first_text in others:
            if cost([*lengths, len(first_text.text)], packed=packed) > most:
                break
            taken.append(first_text)
            lengths.append(len(first_text.text))
        self._remove(taken)
        return taken

    def _round_robin(self) -> Iterator[WaitingText]:
        """Yield the first text of each request, then the second of each, and so on.

        Those of the highest priority alone.
        """
        highest = max(self._priorities.values(), default=0)
        queues = [q for key, q in self._queues.items() if self._priorities[key] == highest]
        longest = max(map(len, queues), default=0)
        for turn in range(longest):
            for queue in queues:
                if turn < len(queue):
                    yield queue[turn]

    def _remove(self, taken: list[WaitingText]) -> None:
        """Remove texts and move their requests behind those that were not served."""
        taken_texts = {(first_text.key, first_text.place) for first_text in taken}
        for key in dict.fromkeys(first_text.key for first_text in taken):
            left = [
                first_text
                for first_text in self._queues.pop(key)
                if (key, first_text.place) not in taken_texts
            ]
            if left:
                self._queues[key] = left
            else:
                del self._priorities[key]
