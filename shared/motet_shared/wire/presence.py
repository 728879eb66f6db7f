"""Remember which models are expected, which have been ready, and how long their starts took.

A lost instance is removed from the directory within seconds; this record determines how long to
wait for its replacement.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from motet_shared.errors import ConfigError, LoadFailed
from motet_shared.messages import Heartbeat, Offer

# Roles that announce models.
ROLES = (
    "tokenizer",
    "decode",
    "prefill",
    "encoder",
    "vad",
    "asr",
    "tts",
    "speakers",
    "diffusion",
    "embedding",
    "ranking",
)
REMEMBERED = 512  # (role, model) pairs; the least recently announced is evicted
SLOWER = 2.0  # multiplier on the measured start time, since the machine may be busy at a restart
SHORTEST = 5.0  # seconds to wait for a replacement if the start was not measured
SUPERVISOR = "operator"  # role that offers models
ON_DEMAND = 600.0  # seconds to wait for a model that is loaded on demand, if no deadline is shorter
SITE_RETURNS = 60.0  # seconds after which a role that a site has lost is not waited for any more
NOTICED = 3.0  # seconds until a death is detected and a supervisor has started a replacement


@dataclass(slots=True)
class _Served:
    start: float = 0.0  # the last measured start time, seconds
    seen: float = 0.0  # last time that it was ready, by `Presence.now`


class Presence:
    """Remember each model of each role that was ready, and which models are expected."""

    def __init__(self) -> None:
        # (role, model), in configured order
        self.expected: tuple[tuple[str, str], ...] = ()
        self.now = 0.0  # seconds, in monitor ticks; stands still during a broker outage
        self._served: OrderedDict[tuple[str, str], _Served] = OrderedDict()
        self._offers: dict[str, dict[tuple[str, str], Offer]] = {}  # by supervisor
        self._sites: OrderedDict[tuple[str, str], float] = (
            OrderedDict()
        )  # last heard, by role and site

    def expect(self, pairs: Iterable[str]) -> None:
        """Set the expected models from ROLE=MODEL pairs; ROLE=none is ignored.

        Raises ConfigError with the malformed pair.
        """
        asked = [pair for text in pairs if (pair := _pair(text))[1] != "none"]
        # a chat model needs both roles
        chat = [("tokenizer", model) for role, model in asked if role == "decode"]
        self.expected = tuple(dict.fromkeys(chat + asked))

    def models(self, role: str) -> list[str]:
        """Return the names of the expected models of a role."""
        return [model for expected, model in self.expected if expected == role]

    def note(self, beat: Heartbeat) -> None:
        """Record a supervisor's offers, or the models of a ready instance and its start time."""
        if beat.role == SUPERVISOR:
            self._offers[beat.instance] = {(one.role, one.model): one for one in beat.offers}
        self._sites[beat.role, beat.site] = self.now
        self._sites.move_to_end((beat.role, beat.site))
        if len(self._sites) > REMEMBERED:
            self._sites.popitem(last=False)
        if beat.state != "ready":
            return
        for card in beat.models:
            served = self._served.get((beat.role, card.name))
            if served is None:
                served = self._served[beat.role, card.name] = _Served()
            served.start, served.seen = beat.start or served.start, self.now
            self._served.move_to_end((beat.role, card.name))
        while len(self._served) > REMEMBERED:
            self._served.popitem(last=False)

    def forget(self, instance: str) -> None:
        """Withdraw the offers of a supervisor that is gone."""
        self._offers.pop(instance, None)

    def sites(self, role: str) -> list[str]:
        """Return the sites that have a role, or had it within the last `SITE_RETURNS` seconds."""
        return [
            site
            for (known, site), heard in self._sites.items()
            if known == role and self.now - heard <= SITE_RETURNS
        ]

    def offer(self, role: str, model: str) -> Offer | None:
        """Return where a model that is loaded on demand stands; None if it is not."""
        found = (offers.get((role, model)) for offers in self._offers.values())
        return next((one for one in found if one is not None), None)

    def offers(self, role: str) -> list[Offer]:
        """Return the models of a role that are loaded on demand, ready or not."""
        every = (one for offers in self._offers.values() for one in offers.values())
        return [one for one in every if one.role == role]

    def check_offer(self, role: str, model: str) -> None:
        """Raise LoadFailed if a model that is loaded on demand could not be started."""
        offer = self.offer(role, model)
        if offer is not None and offer.stage == "failed":
            raise LoadFailed(
                f"model {model!r} cannot be loaded: {offer.problem}; see the log of `motet up`",
                param="model",
            )

    def has_served(self, role: str, model: str) -> bool:
        """Return True if an instance of `role` has been ready for `model`."""
        return (role, model) in self._served

    def is_due(self, role: str, model: str) -> bool:
        """Return True if `model` is expected for `role` and has never been ready."""
        return (role, model) in self.expected and not self.has_served(role, model)

    @property
    def due(self) -> list[tuple[str, str]]:
        """Return the expected (role, model) pairs that have never been ready."""
        return [pair for pair in self.expected if pair not in self._served]

    def patience(self, role: str, model: str, least: float) -> float:
        """Return the seconds to wait for the replacement of a lost instance.

        It scales with the measured start time and is at least `least`. A model that is loaded on
        demand may wait for others to leave, so that only the deadline of a request bounds it.
        """
        if (offer := self.offer(role, model)) is not None:
            return least if offer.stage == "failed" else max(least, ON_DEMAND)
        served = self._served.get((role, model))
        return (
            max(least, SLOWER * served.start + NOTICED)
            if served is not None and served.start
            else least
        )

    def may_return(self, role: str, model: str) -> bool:
        """Return True if `model` was ready so recently that a lost process may be replaced."""
        served = self._served.get((role, model))
        return served is not None and self.now - served.seen <= self.patience(role, model, SHORTEST)


def _pair(text: str) -> tuple[str, str]:
    role, _, model = text.partition("=")
    if role not in ROLES or not model:
        message = f"expect: {text!r} is no ROLE=MODEL; the roles are {', '.join(ROLES)}"
        raise ConfigError(message, param="expect")
    return role, model
