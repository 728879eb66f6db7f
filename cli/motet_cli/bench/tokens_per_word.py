"""Convert tokens to words: the client has no tokenizer, but the server's usage counts tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokensPerWord:
    """Estimate the tokens of a prompt of n words as `overhead + n * per_word`.

    overhead: tokens of the chat template.
    """

    per_word: float = 1.0
    overhead: float = 0.0

    def words(self, tokens: int, *, with_overhead: bool = True) -> int:
        """Return the number of words that make about `tokens` tokens; at least 1."""
        return max(1, round((tokens - (self.overhead if with_overhead else 0.0)) / self.per_word))

    @classmethod
    def fit(cls, short: tuple[int, int], long: tuple[int, int]) -> TokensPerWord:
        """Fit to two observations (words, tokens); without a slope, count a word as a token."""
        per_word = (long[1] - short[1]) / (long[0] - short[0])
        if per_word <= 0:
            return cls()
        return cls(per_word, max(0.0, short[1] - per_word * short[0]))
