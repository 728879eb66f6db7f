"""Generate workloads: arrival times, lengths, and shared prefixes of requests.

Every request has its own random generator, seeded by seed and number: the same seed gives the same
requests, byte for byte, however many of them are taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from motet_cli.bench import words
from motet_cli.bench.lengths import Lengths
from motet_cli.bench.request import Request
from motet_cli.bench.tokens_per_word import TokensPerWord

Process = Literal["poisson", "constant"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Hold the parameters of generated requests.

    rate: requests per second; None: all are due at once, for a closed loop.
    input, output: tokens of a prompt (without its shared prefix) and max_tokens.
    prefix_share: probability that a request begins with one of `prefixes` shared texts of
        `prefix_length` tokens.
    """

    seed: int
    input: Lengths
    output: Lengths
    rate: float | None = None
    process: Process = "poisson"
    prefix_share: float = 0.0
    prefix_length: Lengths
    prefixes: int = 1

    def requests(self, scale: TokensPerWord, part: str = "run") -> Iterator[Request]:
        """Yield requests without end.

        part: name that seeds warm-up and measured requests differently.
        """
        for number, arrival in enumerate(self._arrivals(part)):
            yield self._request(Random(f"{self.seed}/{part}/{number}"), arrival, scale)

    def _arrivals(self, part: str) -> Iterator[float]:
        if self.rate is None:
            yield from itertools.repeat(0.0)
            return
        rng, now = Random(f"{self.seed}/{part}/arrivals"), 0.0
        for number in itertools.count():
            yield now if self.process == "poisson" else number / self.rate
            now += rng.expovariate(self.rate)

    def _request(self, rng: Random, arrival: float, scale: TokensPerWord) -> Request:
        tokens, max_tokens = self.input.draw(rng), self.output.draw(rng)
        prompt = words.draw(rng, scale.words(tokens))
        if rng.random() < self.prefix_share:
            prompt = f"{self._prefix(rng.randrange(self.prefixes), scale)} {prompt}"
        return Request(arrival, prompt, max_tokens)

    def _prefix(self, number: int, scale: TokensPerWord) -> str:
        rng = Random(f"{self.seed}/prefix/{number}")
        return words.draw(rng, scale.words(self.prefix_length.draw(rng), with_overhead=False))
