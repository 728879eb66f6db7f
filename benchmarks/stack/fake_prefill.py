"""Simulate prefill at a fixed speed, one prompt after the other, with a prefix cache of keys only."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from motet_shared.text.prefixes import chain

BLOCK = 16  # tokens

Key = TypeVar("Key", bound=Hashable)


class FakePrefill(Generic[Key]):
    """Simulate a prefill queue and its prefix cache.

    rate: tokens per second. blocks: capacity of the cache, which evicts the least recently used.
    changes: (block, stored) events, as a real prefix cache reports them.
    """

    def __init__(self, rate: float, blocks: int):
        self.rate = rate
        self.changes: deque[tuple[int, bool]] = deque()
        self._most = blocks
        self._held: OrderedDict[int, None] = OrderedDict()
        self._waiting: OrderedDict[Key, Sequence[int]] = OrderedDict()
        self._left: float | None = None  # of the first one
        self._cached = 0  # of the first one

    def add(self, key: Key, prompt: Sequence[int]) -> None:
        self._waiting[key] = prompt

    def drop(self, key: Key) -> None:
        if key in self._waiting:
            if next(iter(self._waiting)) == key:
                self._left = None
            del self._waiting[key]

    def step(self, seconds: float) -> list[tuple[Key, int]]:
        """Advance by `seconds`; return completed keys with their numbers of cached tokens."""
        budget, done = seconds * self.rate, []
        while self._waiting and budget > 0:
            key, prompt = next(iter(self._waiting.items()))
            if self._left is None:
                self._cached = self._find(prompt)
                self._left = float(len(prompt) - self._cached)
            spent = min(budget, self._left)
            budget -= spent
            self._left -= spent
            if self._left <= 0:
                done.append((key, self._cached))
                self.drop(key)
                self.keep(prompt)
        return done

    def keep(self, tokens: Sequence[int]) -> None:
        """Store the blocks of `tokens` in the cache."""
        for block in chain(tokens, BLOCK):
            if block not in self._held:
                self.changes.append((block, True))
            self._held[block] = None
            self._held.move_to_end(block)
        while len(self._held) > self._most:
            oldest, _ = self._held.popitem(last=False)
            self.changes.append((oldest, False))

    @property
    def tokens_left(self) -> float:
        """Return the tokens of waiting prompts, cached ones included."""
        sizes = [float(len(prompt)) for prompt in self._waiting.values()]
        if sizes and self._left is not None:
            sizes[0] = self._left
        return sum(sizes)

    def _find(self, prompt: Sequence[int]) -> int:
        """Return the number of cached tokens of a prompt, at most all but the last."""
        count = 0
        for block in chain(prompt[:-1], BLOCK):
            if block not in self._held:
                break
            self._held.move_to_end(block)
            count += BLOCK
        return count
