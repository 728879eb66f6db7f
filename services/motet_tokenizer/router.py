"""Choose the decode instance of a request from heartbeats: a library, not another hop.

A request goes to the instance where it costs the fewest seconds:

    cost = (tokens to prefill before it + its own that are not cached) · seconds per prefilled token
         + streams there · tokens that a reply has left · seconds that a stream adds to a step
         + seconds to load its adapter, where it is not resident
         + what `site_margin` further streams would cost, if it is at another site

This is cache-aware routing by expected cost, as in Preble (Srivatsa et al. 2024), SGLang's router
and NVIDIA Dynamo's KV-aware router: cached tokens are known block by block (`PrefixIndex`), so a
conversation stays at its instance as long as that saves more than a shorter queue. Queues and
speeds come with heartbeats; requests sent since the last one are added.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from random import Random

from motet_shared.errors import Unavailable
from motet_shared.messages import Heartbeat, ModelCard, tier_of
from motet_shared.text.prefixes import ROOT, chain
from motet_shared.wire import sites
from motet_shared.wire.discovery import Directory
from motet_tokenizer.prefix_index import ROLE, PrefixIndex

INITIAL_REPLY_TOKENS = 64.0  # tokens of a reply, before any was measured
DEFAULT_LOAD_SECONDS = 0.2  # seconds to load an adapter, where none was measured yet
REPLY_WEIGHT = 0.05  # weight of the newest reply in their mean


@dataclass(slots=True, eq=False)
class PromptLoad:
    """Describe the load of a request.

    names: prefix names of its prompt and output tokens (see `prefixes`). target: the only target
    that may serve it; empty: any.
    """

    names: Sequence[int] = ()
    priority: int = 0
    target: str = ""
    _chains: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def chain(self, block_size: int, root: int = ROOT) -> list[int]:
        """Return its block keys, without the last token, which is always computed.

        `root`: the key that the chain begins with.
        """
        key = block_size, root
        if key not in self._chains:
            self._chains[key] = chain(self.names[: max(0, len(self.names) - 1)], block_size, root)
        return self._chains[key]

    @property
    def tier(self) -> str:
        """Return the service tier of the request's priority."""
        return tier_of(self.priority)


class Router:
    """Choose decode instances.

    `policy`: "prefix" as above, "load" ignores the caches, "random" ignores everything.
    """

    def __init__(
        self, directory: Directory, index: PrefixIndex | None = None, policy: str = "prefix"
    ):
        self._directory = directory
        directory.on_gone.append(self._forget)
        self._index = index
        # By instance: heartbeat number, and tokens sent to the instance since then.
        self._sent: dict[str, tuple[int, int]] = {}
        # By instance and adapter: heartbeat number when the adapter was last requested there.
        self._adapter_requests: dict[tuple[str, str], int] = {}
        self._rotation = 0
        self._random = Random()
        self._mean_reply = INITIAL_REPLY_TOKENS  # tokens, on average
        self._choose: Callable[[list[Heartbeat], str, PromptLoad], Heartbeat] = {
            "prefix": self._cheapest,
            "load": self._cheapest,
            "random": lambda ready, model, load: self._random.choice(ready),
        }[policy]
        self._uses_caches = policy == "prefix"

    def pick(
        self, model: str, avoid: Collection[str] = (), load: PromptLoad | None = None
    ) -> str | None:
        """Return a ready, unsuspected instance that serves `model`; None if there is none.

        Of a chain of targets, it belongs to the first target that has one.
        """
        load = load or PromptLoad()
        ready = _first_target(self._able(model, avoid, load.target), model)
        if not ready:
            return None
        self._rotation += 1  # rotates the order among instances of equal cost
        start = self._rotation % len(ready)
        chosen = self._choose(ready[start:] + ready[:start], model, load)
        if (card := _card(chosen, model)) is not None and card.parent:
            self._adapter_requests[chosen.instance, model] = chosen.seq
        self._sent[chosen.instance] = (
            chosen.seq,
            self._sent_since(chosen) + self._uncached(chosen, model, load),
        )
        return chosen.instance

    async def wait(
        self, model: str, avoid: Collection[str], patience: float, load: PromptLoad | None = None
    ) -> str:
        """Return the result of `pick`, waiting for an instance to appear.

        Raises Unavailable after `patience` seconds; NoAllowedSite if the request is limited to
        sites, at once where decode is at none of them.
        """
        base = self._directory.base_of(model)
        if not self._directory.may_serve(ROLE):
            raise sites.refusal(f"{ROLE} for {model!r}")

        def pick_or_fail(directory: Directory) -> str | None:
            instance = self.pick(model, avoid, load)
            if instance is None:
                directory.presence.check_offer(ROLE, base)
            return instance

        try:
            with self._directory.wanting(ROLE, base):
                instance = await self._directory.wait_for(pick_or_fail, patience)
        except TimeoutError:
            if sites.allowed():
                raise sites.refusal(f"{ROLE} for {model!r}") from None
            message = f"no decode instance for model {model!r} is ready after {patience:g} s; retry in a moment"
            raise Unavailable(message, param="model") from None
        return str(instance)

    def has(self, model: str, avoid: Collection[str], target: str = "") -> bool:
        """Return True if an instance serves `model`, `avoid` left out."""
        return bool(self._able(model, avoid, target))

    def _able(self, model: str, avoid: Collection[str], target: str) -> list[Heartbeat]:
        """Return the ready instances that serve `model`, of all targets or of one."""
        return [
            beat
            for beat in self._directory.ready(ROLE, model=model)
            if beat.instance not in avoid
            and (not target or ((card := _card(beat, model)) and card.target == target))
        ]

    def target_of(self, instance: str, model: str) -> str:
        """Return the name of the target that an instance belongs to; empty: there is no chain."""
        card = self.card_at(instance, model)
        return "" if card is None else card.target

    def of_target(self, target: str, model: str) -> set[str]:
        """Return the ready instances of a target."""
        beats = self._directory.ready(ROLE, model=model)
        return {beat.instance for beat in beats if (c := _card(beat, model)) and c.target == target}

    def context(self, model: str, limit: int) -> int:
        """Return the longest prompt plus output: `limit`, or less if decode has less room."""
        cards = [
            c
            for beat in self._directory.ready(ROLE, model=model)
            for c in beat.models
            if c.name == model
        ]
        return min([limit, *(card.context for card in cards if card.context > 0)])

    def first_cards(self, model: str, target: str = "") -> list[ModelCard]:
        """Return the model's cards at the ready instances that `pick` chooses from."""
        ready = _first_target(self._able(model, (), target), model)
        return [card for beat in ready if (card := _card(beat, model)) is not None]

    def card_at(self, instance: str, model: str) -> ModelCard | None:
        """Return the model's card at an instance; None if that is not ready."""
        beats = self._directory.ready(ROLE, model=model, suspects=True)
        beat = next((beat for beat in beats if beat.instance == instance), None)
        return None if beat is None else _card(beat, model)

    def note_reply(self, tokens: int) -> None:
        """Add the length of a finished reply to the running mean."""
        self._mean_reply += REPLY_WEIGHT * (tokens - self._mean_reply)

    # ---------------------------------------------------------------------------------------- costs
    def _cheapest(self, ready: list[Heartbeat], model: str, load: PromptLoad) -> Heartbeat:
        # An instance without measurements counts as fast as the median of the others; without any
        # measurement, the unit of cost is a token.
        prefill, row = (_typical(ready, name) for name in ("prefill_token", "decode_row"))
        return min(ready, key=lambda beat: self._cost(beat, model, load, prefill, row))

    def _cost(
        self, beat: Heartbeat, model: str, load: PromptLoad, prefill: float, row: float
    ) -> float:
        ahead = beat.load.get(f"prefill_{load.tier}", 0.0) + self._sent_since(beat)
        prefilled = (ahead + self._uncached(beat, model, load)) * (
            beat.load.get("prefill_token") or prefill
        )
        # `row` is the median over instances: with few streams, an instance measures the price of a
        # step rather than that of a stream.
        directory = self._directory
        streams = directory.active(beat.instance)
        if not directory.is_near(beat):
            streams += directory.site_margin
        return prefilled + streams * self._mean_reply / 2 * row + self._loading(beat, model)

    def _loading(self, beat: Heartbeat, model: str) -> float:
        """Return the seconds to load the adapter `model`; 0 where it is resident or requested."""
        card = _card(beat, model)
        if (
            card is None
            or card.resident
            or self._adapter_requests.get((beat.instance, model)) == beat.seq
        ):
            return 0.0
        return beat.load.get("adapter_load") or DEFAULT_LOAD_SECONDS

    def _uncached(self, beat: Heartbeat, model: str, load: PromptLoad) -> int:
        """Return the tokens that this instance would have to prefill."""
        card = _card(beat, model)
        if card is None or not card.block_size or self._index is None or not self._uses_caches:
            return len(load.names)
        chain = load.chain(card.block_size, card.hash_root)
        return len(load.names) - card.block_size * self._index.held(beat.instance, chain)

    def _forget(self, instance: str) -> None:
        self._sent.pop(instance, None)
        self._adapter_requests = {
            key: seq for key, seq in self._adapter_requests.items() if key[0] != instance
        }

    def _sent_since(self, beat: Heartbeat) -> int:
        number, tokens = self._sent.get(beat.instance, (-1, 0))
        return tokens if number == beat.seq else 0


def _card(beat: Heartbeat, model: str) -> ModelCard | None:
    return next((card for card in beat.models if card.name == model), None)


def _first_target(beats: list[Heartbeat], model: str) -> list[Heartbeat]:
    """Return the instances whose target comes first in the model's chain."""
    ranks = [card.rank if (card := _card(beat, model)) else 0 for beat in beats]
    first = min(ranks, default=0)
    return [beat for beat, rank in zip(beats, ranks, strict=True) if rank == first]


def _typical(beats: Sequence[Heartbeat], name: str) -> float:
    known = [value for beat in beats if (value := beat.load.get(name, 0.0)) > 0]
    return statistics.median(known) if known else 1.0
