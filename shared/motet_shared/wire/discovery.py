"""Track live instances and their load from heartbeats, and answer the NATS service API.

There is no registry: each process keeps its own `Directory` of the others. `ServiceResponder`
answers `$SRV.{PING,INFO,STATS}` in the wire format of ADR-32 (JSON), so that the `nats`
command-line tool lists Motet's services; nats-py's own `micro` serves one request at a time and
drops requests on stop.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from motet_shared import __version__
from motet_shared.messages import PROTOCOL, Heartbeat, decode_heartbeat

from . import sites, subjects
from .call import Calls
from .outbox import Outbox
from .presence import Presence
from .stream import Caller
from .transport import Message

HEARTBEAT_EVERY = 0.5  # seconds, in a stack of up to `HEARD * HEARTBEAT_EVERY` instances
HEARD = 300  # heartbeats per second that a process of a larger stack hears, see `period_of`
ANSWERED = 100  # instances up to which a newcomer is answered at once
WANTED_FOR = 2.0  # seconds that a refused request counts as one that waits
EXPIRES_AFTER = 3.0  # seconds at least, counted in this process's monitor ticks
LOOK_EVERY = 0.25  # seconds between two looks for instances that have expired
MISSED = 2.5  # missed heartbeats, after which an instance expires, if that takes longer
DARK_AFTER = 1.25  # seconds at least without a heartbeat of any instance of a site
MANY = 20  # instances of a site of which some are always heard within a period
SITE_MARGIN = 4.0  # streams by which an instance elsewhere must be less busy to be preferred


def period_of(instances: int) -> float:
    """Return the seconds between two heartbeats in a stack of so many instances.

    Each process hears all of them, so that a fixed period would cost it the more, the more there are.
    """
    return max(HEARTBEAT_EVERY, instances / HEARD)


@dataclass(slots=True)
class _Peer:
    heartbeat: Heartbeat
    subject: str  # of its heartbeats
    expires: float  # time of the directory
    streams: int = 0  # streams of this process at the peer when the heartbeat came
    suspected_at: int = -1  # heartbeat number at which it was reported lost


@dataclass(slots=True)
class _Site:
    instances: int = 0
    heard: float = 0.0  # when the last heartbeat of any came, by the directory's time
    every: float = HEARTBEAT_EVERY  # seconds between two heartbeats of an instance

    def is_silent(self, now: float) -> bool:
        """Return True if some of its instances should have been heard by now."""
        usual = MISSED * self.every * min(1.0, MANY / self.instances)
        return now - self.heard > max(DARK_AFTER, usual)


class Directory:
    """Track all instances with a recent heartbeat.

    site: of this process; "" if it has none. site_margin: streams that the least busy instance of its
    own site may have more than the least busy elsewhere.
    """

    def __init__(self, caller: Caller, site: str = "", site_margin: float = SITE_MARGIN):
        self.site, self.site_margin = site, site_margin
        self._caller = caller
        self._peers: dict[str, _Peer] = {}
        self._changed = asyncio.Event()
        self.on_newcomer: Callable[[], None] = lambda: None
        # called with the id of an instance that stopped or expired, e.g. store.forget
        self.on_gone: list[Callable[[str], None]] = []
        # Called with a site of which nothing is heard any more, and its instances.
        self.on_dark: Callable[[str, list[str]], None] = lambda site, instances: None
        self._dark: set[str] = set()
        self._sites: dict[str, _Site] = {}
        self._now = self._looked = 0.0  # seconds in ticks; when peers were last looked through
        self.dropped: Counter[str] = Counter()
        self.presence = Presence()  # expected models, and models that have been ready
        # Requests of this process that wait for an instance, by (role, model).
        self.wanted: Counter[tuple[str, str]] = Counter()
        # Seconds that models are asked to stay without requests, by (role, model); -1: for good.
        self.kept: dict[tuple[str, str], float] = {}
        # Called for the first request that waits, and when a model is asked to stay.
        self.on_want: Callable[[], None] = lambda: None

    # -------------------------------------------------------------------------------------- reading
    def instances(self, role: str) -> list[Heartbeat]:
        """Return every live instance of a role, in any state."""
        return [p.heartbeat for p in self._peers.values() if p.heartbeat.role == role]

    def everyone(self) -> list[Heartbeat]:
        """Return every live instance of every role, in any state."""
        return [peer.heartbeat for peer in self._peers.values()]

    def ready(
        self, role: str, model: str | None = None, *, suspects: bool = False
    ) -> list[Heartbeat]:
        """Return the instances of a role that take new work, for `model` if given.

        Instances that were just reported lost are included only if `suspects` is set. Those of
        sites at which the running task may have no work done are left out.
        """
        return [
            peer.heartbeat
            for peer in self._peers.values()
            if peer.heartbeat.role == role
            and peer.heartbeat.state == "ready"
            and (suspects or peer.heartbeat.seq > peer.suspected_at)
            and (model is None or any(card.name == model for card in peer.heartbeat.models))
            and sites.permits(peer.heartbeat.site)
        ]

    def site_of(self, instance: str) -> str:
        """Return the site of an instance; "" if it has none or is unknown."""
        peer = self._peers.get(instance)
        return "" if peer is None else peer.heartbeat.site

    def is_near(self, beat: Heartbeat) -> bool:
        """Return True unless an instance is at another site than this process."""
        return not self.site or not beat.site or beat.site == self.site

    def preferred(self, beats: list[Heartbeat]) -> list[Heartbeat]:
        """Return the near ones of some instances, or those elsewhere.

        Those elsewhere if none is near, or if the least busy near one has more than `site_margin`
        streams more than the least busy elsewhere.
        """
        near = [beat for beat in beats if self.is_near(beat)]
        if not near or len(near) == len(beats):
            return beats
        far = [beat for beat in beats if not self.is_near(beat)]
        excess = self._least_active(near) - self._least_active(far)
        return far if excess > self.site_margin else near

    def least_busy(self, beats: list[Heartbeat]) -> str:
        """Return the instance with the fewest streams among the preferred ones of `beats`."""
        names = [beat.instance for beat in self.preferred(beats)]
        return min(names, key=lambda name: (self.active(name), random.random()))

    def _least_active(self, beats: list[Heartbeat]) -> float:
        return min(self.active(beat.instance) for beat in beats)

    def may_serve(self, role: str) -> bool:
        """Return True if a site where the running task may have work done has this role.

        Also if it had it a moment ago, or may have it: an instance in any state counts.
        """
        if not sites.allowed():
            return True
        return any(map(sites.permits, self.presence.sites(role)))

    def base_of(self, model: str) -> str:
        """Return the base model of the adapter `model`, or `model` itself if it is no adapter."""
        cards = (card for peer in self._peers.values() for card in peer.heartbeat.models)
        return next((card.parent for card in cards if card.name == model and card.parent), model)

    def outstanding(self, instance: str) -> int:
        """Return the number of streams that this process has open at an instance."""
        return len(self._caller.by_peer.get(instance, ()))

    def active(self, instance: str) -> float:
        """Return the number of streams of all callers at an instance.

        Streams of other callers are as last announced, those of this process are current.
        """
        peer = self._peers.get(instance)
        others = peer.heartbeat.load.get("active", 0.0) - peer.streams if peer is not None else 0.0
        return max(0.0, others) + self.outstanding(instance)

    def is_coming(self, role: str, model: str) -> bool:
        """Return True if work for `model` should wait.

        The model is starting, was lost a moment ago and may be replaced, or is loaded on demand.
        """
        if self.presence.offer(role, model) is not None:
            return True
        return self.is_starting(role, model) or self.presence.may_return(role, model)

    def is_starting(self, role: str, model: str) -> bool:
        """Return True if `model` is starting.

        It is expected and has not served yet, or an instance that may serve it is starting.
        """
        if self.presence.is_due(role, model):
            return True
        if (offer := self.presence.offer(role, model)) is not None:
            return offer.stage != "failed"
        beats = self.instances(role)
        # The models of an instance are unknown until it has loaded: assume any known model, or a
        # first one.
        any_known = self.presence.has_served(role, model) or not any(beat.models for beat in beats)
        return any(
            beat.state in ("starting", "warming")
            and (any(card.name == model for card in beat.models) or (any_known and not beat.models))
            for beat in beats
        )

    @contextmanager
    def wanting(self, role: str, model: str) -> Iterator[None]:
        """Announce within the block that a request of this process waits for an instance.

        A supervisor loads a model that it offers on demand because of that.
        """
        self.wanted[role, model] += 1
        if self.wanted[role, model] == 1 and self.presence.offer(role, model) is not None:
            self.on_want()
        try:
            yield
        finally:
            self.wanted[role, model] -= 1
            if not self.wanted[role, model]:
                del self.wanted[role, model]

    def want_soon(self, role: str, model: str, seconds: float = WANTED_FOR) -> None:
        """Announce for some seconds that a request for a model was refused and will be repeated."""
        hold = self.wanting(role, model)
        hold.__enter__()
        asyncio.get_running_loop().call_later(seconds, hold.__exit__, None, None, None)

    def keep(self, role: str, model: str, seconds: float) -> None:
        """Announce how long a model that is loaded on demand is to stay without requests.

        -1: for good. The supervisor that offers it follows the latest announcement.
        """
        self.kept[role, model] = seconds
        self.on_want()
        asyncio.get_running_loop().call_later(WANTED_FOR, self._announced, role, model, seconds)

    def _announced(self, role: str, model: str, seconds: float) -> None:
        if self.kept.get((role, model)) == seconds:
            del self.kept[role, model]

    async def changed(self, timeout: float) -> None:
        """Wait for the next heartbeat, at most `timeout` seconds."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()

    async def wait_for(self, condition: Callable[[Directory], Any], timeout: float) -> Any:
        """Return the first true value of `condition(self)`, evaluated at every change.

        Raises TimeoutError after `timeout` seconds.
        """
        async with asyncio.timeout(timeout):
            while not (value := condition(self)):
                self._changed.clear()
                await self._changed.wait()
            return value

    # ------------------------------------------------------------------------------------- learning
    def on_heartbeat(self, message: Message) -> None:
        """Record a heartbeat; malformed and forged ones are counted and dropped."""
        try:
            beat = decode_heartbeat(message.data)
            known = self._peers.get(beat.instance)
            subject = subjects.heartbeat(beat.instance) if known is None else known.subject
            genuine = message.subject == subject and beat.v == PROTOCOL
            # Routers and planners do arithmetic on the load.
            if not math.isfinite(sum(beat.load.values())):
                raise ValueError(f"load of {beat.instance} is not finite")
        except ValueError:
            self.dropped["malformed_heartbeat"] += 1
            return
        if not genuine:  # permissions bind the subject to a role: the content must agree with it
            self.dropped["forged_heartbeat"] += 1
            return
        self.presence.note(beat)
        if beat.state == "stopped":
            self._remove(beat.instance)
        else:
            if known is not None and known.heartbeat.site != beat.site:  # counted at the other one
                self._remove(beat.instance)
                known = None
            expires = self._now + max(EXPIRES_AFTER, MISSED * beat.every)
            streams = self.outstanding(beat.instance)
            if (site := self._sites.get(beat.site)) is None:
                site = self._sites[beat.site] = _Site()
            site.heard, site.every = self._now, beat.every
            if known is None:
                self._peers[beat.instance] = _Peer(beat, subject, expires, streams)
                site.instances += 1
                if len(self._peers) <= ANSWERED:
                    self.on_newcomer()
            else:
                known.heartbeat, known.streams, known.expires = beat, streams, expires
        self._changed.set()

    def suspect(self, instance: str) -> None:
        """Exclude a lost instance from `ready` until it has sent two newer heartbeats.

        One more heartbeat may still be in flight from an instance that hangs.
        """
        peer = self._peers.get(instance)
        if peer is not None:
            peer.suspected_at = peer.heartbeat.seq + 1
            self._changed.set()

    async def tick(self, elapsed: float) -> None:
        """Advance time by `elapsed` seconds; remove peers that were silent for too long."""
        self.presence.now += elapsed
        self._now = now = self._now + elapsed
        if now - self._looked > LOOK_EVERY:
            self._looked = now
            for instance in [name for name, peer in self._peers.items() if peer.expires < now]:
                self._remove(instance)
        self._note_dark()

    @property
    def period(self) -> float:
        """Return the seconds between two heartbeats of an instance."""
        return period_of(len(self._peers))

    def _note_dark(self) -> None:
        """Report sites that went dark, unless nothing at all is heard: that is this process's fault."""
        silent = {name for name, site in self._sites.items() if name and site.is_silent(self._now)}
        if len(silent) == len(self._sites):
            return
        for site in silent - self._dark:
            beats = [peer.heartbeat for peer in self._peers.values()]
            self.on_dark(site, [beat.instance for beat in beats if beat.site == site])
        self._dark = silent

    def _remove(self, instance: str) -> None:
        self.presence.forget(instance)
        if (gone := self._peers.pop(instance, None)) is not None:
            name = gone.heartbeat.site
            self._sites[name].instances -= 1
            if not self._sites[name].instances:
                del self._sites[name]
            self._changed.set()
            for tell in self.on_gone:
                tell(instance)


class ServiceResponder:
    """Answer `$SRV.PING`, `.INFO` and `.STATS` for all services, for this name, and for this id."""

    def __init__(
        self,
        calls: Calls,
        outbox: Outbox,
        describe: Callable[[], dict[str, Any]],
        integrity: Callable[[], str],
    ):
        self._calls = calls
        self._outbox = outbox
        self._describe = describe  # the actor's stats()
        self._integrity = integrity
        self._started = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        self._role = subjects.role_of(calls.instance)
        self.name = f"motet-{self._role}"

    def subjects(self) -> list[str]:
        """Return the nine subjects to subscribe to."""
        instance = self._calls.instance
        return [
            subjects.service(verb, *scope)
            for verb in ("PING", "INFO", "STATS")
            for scope in ((), (self.name,), (self.name, instance))
        ]

    def on_request(self, message: Message) -> None:
        """Reply to one request with JSON."""
        verb = message.subject.split(".")[1]
        answer = {"PING": self._ping, "INFO": self._info, "STATS": self._stats}[verb]()
        if message.reply:
            self._outbox.put(message.reply, msgspec.json.encode(answer))

    def _identity(self, kind: str) -> dict[str, Any]:
        return {
            "type": f"io.nats.micro.v1.{kind}",
            "name": self.name,
            "id": self._calls.instance,
            "version": __version__,
            "metadata": {"state": self._calls.state, "protocol": str(PROTOCOL)},
        }

    def _ping(self) -> dict[str, Any]:
        return self._identity("ping_response")

    def _endpoints(self) -> list[dict[str, Any]]:
        return [
            {"name": op, "subject": subjects.operation(self._role, op), "queue_group": self._role}
            for op in self._calls.handlers
        ]

    def _info(self) -> dict[str, Any]:
        endpoints = [{**endpoint, "metadata": {}} for endpoint in self._endpoints()]
        return {
            **self._identity("info_response"),
            "description": f"Motet {self._role}",
            "endpoints": endpoints,
        }

    def _stats(self) -> dict[str, Any]:
        calls = self._calls
        busy = int(calls.busy_seconds * 1e9)
        counts = {
            "num_requests": calls.requests,
            "num_errors": calls.errors,
            "last_error": calls.last_error,
            "processing_time": busy,
            "average_processing_time": busy // max(calls.requests, 1),
            "data": self._describe(),
        }
        endpoints = [{**endpoint, **counts} for endpoint in self._endpoints()]
        identity = self._identity("stats_response")
        identity["metadata"]["integrity"] = self._integrity()
        return {**identity, "started": self._started, "endpoints": endpoints}
