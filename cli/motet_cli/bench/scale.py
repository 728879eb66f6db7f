"""From tokens to words: a client has no tokenizer, but the server's usage tells what words cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A prompt of n words has `overhead + n * per_word` tokens, on average. The overhead is the chat template's."""

    per_word: float = 1.0
    overhead: float = 0.0

    def words(self, tokens: int, *, with_overhead: bool = True) -> int:
        """Words that make about `tokens` tokens; at least 1."""
        return max(1, round((tokens - (self.overhead if with_overhead else 0.0)) / self.per_word))

    @classmethod
    def fit(cls, short: tuple[int, int], long: tuple[int, int]) -> Scale:
        """From two observations of (words, tokens)."""
        per_word = (long[1] - short[1]) / (long[0] - short[0])
        if per_word <= 0:
            return cls()
        return cls(per_word, max(0.0, short[1] - per_word * short[0]))
