"""Which decode instance takes a request: a library over what instances tell of themselves, not another hop.

A request goes where it is to cost the fewest seconds:

    (tokens to prefill before it + its own that are not cached) · seconds per prefilled token
    + streams there · tokens that a reply has left · seconds that a stream adds to a step

What is cached is known block by block (`PrefixIndex`), so a conversation stays where it was as long as that is worth
more than a shorter queue. Queues and speeds come with heartbeats; what was sent there since the last one is added.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from random import Random

from motet_shared.discovery import Directory
from motet_shared.errors import Unavailable
from motet_shared.messages import Heartbeat, tier_of
from motet_shared.prefixes import chain
from motet_tokenizer.prefix_index import ROLE, PrefixIndex

FIRST_GUESS = 64.0  # tokens of a reply
MEMORY = 0.05  # weight of the newest reply in their mean


@dataclass(slots=True, eq=False)
class Load:
    """What a request weighs. names: of prompt and output (`prefixes`)."""

    names: Sequence[int] = ()
    priority: int = 0
    _chains: dict[int, list[int]] = field(default_factory=dict)

    def chain(self, block_size: int) -> list[int]:
        """Its blocks, but for the last token's, which is always computed."""
        if block_size not in self._chains:
            self._chains[block_size] = chain(self.names[: max(0, len(self.names) - 1)], block_size)
        return self._chains[block_size]

    @property
    def tier(self) -> str:
        return tier_of(self.priority)


class Router:
    """`policy`: "prefix" is as above, "load" leaves the caches out of account, "random" everything."""

    def __init__(self, directory: Directory, index: PrefixIndex | None = None, policy: str = "prefix"):
        self._directory = directory
        directory.on_gone.append(self._forget)
        self._index = index
        self._sent: dict[str, tuple[int, int]] = {}  # instance: heartbeat number, tokens given to it since then
        self._turn = 0
        self._random = Random()
        self._reply = FIRST_GUESS  # tokens, on average
        self._choose: Callable[[list[Heartbeat], str, Load], Heartbeat] = {
            "prefix": self._cheapest,
            "load": self._cheapest,
            "random": lambda ready, model, load: self._random.choice(ready),
        }[policy]
        self._sees_caches = policy == "prefix"

    def pick(self, model: str, avoid: Collection[str] = (), load: Load | None = None) -> str | None:
        """A ready instance that serves `model` and is not suspected; None if there is none."""
        ready = [beat for beat in self._directory.ready(ROLE, model=model) if beat.instance not in avoid]
        if not ready:
            return None
        self._turn += 1  # rotates the order in which equals are met
        start = self._turn % len(ready)
        load = load or Load()
        chosen = self._choose(ready[start:] + ready[:start], model, load)
        self._sent[chosen.instance] = chosen.seq, self._sent_since(chosen) + self._uncached(chosen, model, load)
        return chosen.instance

    async def wait(self, model: str, avoid: Collection[str], patience: float, load: Load | None = None) -> str:
        """The same, waiting for an instance to appear. Raises Unavailable after `patience` seconds."""
        try:
            instance = await self._directory.wait_for(lambda _: self.pick(model, avoid, load), patience)
        except TimeoutError:
            message = f"no decode instance for model {model!r} is ready after {patience:g} s; retry in a moment"
            raise Unavailable(message, param="model") from None
        return str(instance)

    def has(self, model: str, avoid: Collection[str]) -> bool:
        """Whether there is an instance to pick."""
        return any(beat.instance not in avoid for beat in self._directory.ready(ROLE, model=model))

    def context(self, model: str, limit: int) -> int:
        """Longest prompt plus output: `limit`, or what the decode instances have room for, if that is less."""
        cards = [c for beat in self._directory.ready(ROLE, model=model) for c in beat.models if c.name == model]
        return min([limit, *(card.context for card in cards if card.context > 0)])

    def note_reply(self, tokens: int) -> None:
        """A reply has ended after so many tokens."""
        self._reply += MEMORY * (tokens - self._reply)

    # ----------------------------------------------------------------------------------------------------------- costs
    def _cheapest(self, ready: list[Heartbeat], model: str, load: Load) -> Heartbeat:
        # An instance that has not computed yet is taken to be as fast as the others; if none has, a token is the unit.
        prefill, row = (_typical(ready, name) for name in ("prefill_token", "decode_row"))
        return min(ready, key=lambda beat: self._cost(beat, model, load, prefill, row))

    def _cost(self, beat: Heartbeat, model: str, load: Load, prefill: float, row: float) -> float:
        ahead = beat.load.get(f"prefill_{load.tier}", 0.0) + self._sent_since(beat)
        prefilled = (ahead + self._uncached(beat, model, load)) * (beat.load.get("prefill_token") or prefill)
        # All streams go by one rate: that of an instance with few of them says what is the price of a step.
        return prefilled + self._directory.active(beat.instance) * self._reply / 2 * row

    def _uncached(self, beat: Heartbeat, model: str, load: Load) -> int:
        """Tokens that it would have to prefill."""
        size = next((card.block_size for card in beat.models if card.name == model), 0)
        if not size or self._index is None or not self._sees_caches:
            return len(load.names)
        return len(load.names) - size * self._index.held(beat.instance, load.chain(size))

    def _forget(self, instance: str) -> None:
        self._sent.pop(instance, None)

    def _sent_since(self, beat: Heartbeat) -> int:
        number, tokens = self._sent.get(beat.instance, (-1, 0))
        return tokens if number == beat.seq else 0


def _typical(beats: Sequence[Heartbeat], name: str) -> float:
    known = [value for beat in beats if (value := beat.load.get(name, 0.0)) > 0]
    return statistics.median(known) if known else 1.0
