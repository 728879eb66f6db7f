"""Connect a process to the wire: two connections, one inbox, streams and a directory of peers.

Control messages (opens, credits, probes, heartbeats) and frames have a connection each, so that a
flood of frames never delays a cancel; input that callers feed into streams shares the frames'
connection. All frames for this process arrive on one subject, whatever the number of streams.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

from motet_shared.credentials import PasswordFile
from motet_shared.messages import PROTOCOL, Heartbeat, ModelCard, Offer, encode
from motet_shared.process.clock import Clock, SystemClock
from motet_shared.process.config import ProcessConfig
from motet_shared.process.starts import START
from motet_shared.process.vitals import Vitals

from . import sites, subjects
from .broker import Broker
from .call import Calls
from .discovery import SITE_MARGIN, Directory, ServiceResponder
from .epochs import NO_EPOCH, Epoch
from .outbox import Outbox
from .peers import Monitor
from .stream import Caller, Stream
from .transport import Message, NatsTransport, Transport

HOST = socket.gethostname()

log = logging.getLogger(__name__)


class Bus:
    """Own the connections, streams and peer directory of one process.

    `Bus.connect` connects to NATS; tests build it on a `MemoryTransport`.
    """

    def __init__(
        self,
        instance: str,
        control: Transport,
        frames: Transport,
        clock: Clock | None = None,
        *,
        site: str = "",
        site_margin: float = SITE_MARGIN,
    ):
        """Create the bus of an instance.

        `site`, `site_margin`: as of `Directory`.
        """
        self.instance = instance
        self.site = site
        self.role = subjects.role_of(instance)
        self.control = control
        self.frames = frames
        self.clock = clock or SystemClock()
        self.caller = Caller(instance, control, frames, self.clock)
        self._replies = Outbox(control)
        self.calls = Calls(instance, frames, self._replies, self.clock, site=site)
        self.directory = Directory(self.caller, site, site_margin)
        self.broker = Broker([control, frames])
        self.monitor = Monitor(self.caller, self.calls, control, self.clock, self.broker)
        self.describe: Callable[[], dict[str, Any]] = dict
        self.integrity: Callable[[], str] = lambda: "unknown"
        self.presence: Callable[[], tuple[list[ModelCard], dict[str, float]]] = lambda: ([], {})
        self.offers: Callable[[], list[Offer]] = list  # a supervisor's
        self._vitals = Vitals(lambda: self.monitor.late)
        # Of several queued heartbeats only the newest is sent.
        self._events = Outbox(control, lambda parts: parts[-1])
        self._beats = 0
        self._since_beat = 0.0
        self.caller.on_lost = self.directory.suspect
        self.directory.on_dark = self._leave_dark
        self.directory.on_newcomer = self.directory.on_want = self.heartbeat
        self.caller.peers_are_back = lambda: self.broker.peers_are_back
        self.monitor.duties = [self._expire_silent, self._beat_when_due]

    @classmethod
    async def connect(cls, instance: str, config: ProcessConfig) -> Bus:
        """Open two NATS connections as the user of the instance's role and start.

        Raises NatsUnreachable if no server answers within 5 s; no connection is left then.
        """
        user = config.nats_user or subjects.role_of(instance)
        tls = config.peer_tls()
        connect = functools.partial(
            NatsTransport.connect,
            config.nats_url,
            user=user,
            password=_password(config, user),
            tls=None if tls is None else tls.client,
        )
        prefix = subjects.inbox(instance)
        async with AsyncExitStack() as failing:
            control = await connect(name=instance, inbox_prefix=f"{prefix}.r")
            failing.push_async_callback(control.close)
            frames = await connect(name=f"{instance}/frames", inbox_prefix=f"{prefix}.r")
            failing.push_async_callback(frames.close)
            bus = cls(
                instance, control, frames, site=config.site or "", site_margin=config.site_margin
            )
            await bus.start()
            failing.pop_all()
        return bus

    async def start(self) -> None:
        """Subscribe to all subjects and begin to send heartbeats.

        Opens are refused as `draining` until `calls.state` is ready.
        """
        for part in (self.caller, self.calls, self._events, self._replies):
            part.start()
        await self.frames.subscribe(subjects.frames_to(self.instance), self.caller.on_frames)
        await self.frames.subscribe(subjects.feeds_to(self.instance), self.calls.on_feeds)
        await self.control.subscribe(
            subjects.open_replies(self.instance), self.caller.on_open_reply
        )
        await self.control.subscribe(subjects.control_at(self.instance), self._on_control)
        await self.control.subscribe(subjects.HEARTBEATS, self.directory.on_heartbeat)
        responder = ServiceResponder(
            self.calls,
            self._replies,
            lambda: self.stats() | self.describe(),
            lambda: self.integrity(),
        )
        for subject in responder.subjects():
            await self.control.subscribe(subject, responder.on_request)
        await self.control.flush()
        await self.frames.flush()
        self.monitor.start()
        self.heartbeat()

    async def serve(self, handlers: dict[str, Callable[[Any, Any], Awaitable[None]]]) -> None:
        """Accept opens of these operations, for the role's queue group or for this instance."""
        self.calls.handlers = handlers
        for op in handlers:
            await self.control.subscribe(
                subjects.operation(self.role, op), self.calls.on_open, queue=self.role
            )
        await self.control.subscribe(subjects.open_at(self.instance), self.calls.on_open)
        await self.control.flush()

    def open(
        self,
        role: str,
        body: Any,
        *,
        instance: str | None = None,
        window: int = 64,
        deadline: float | None = None,
        epoch: Epoch = NO_EPOCH,
    ) -> Stream:
        """Open a streaming call, see `stream`.

        `instance=None` reaches any instance of the role, a near one if this process has a site.

        Raises NoAllowedSite if the running task is limited to sites (`sites.only`), and the instance
        is at none of them, or no instance of the role is ready there.
        """
        allowed = sites.allowed()
        if instance is None and (allowed or self.site) and (ready := self.directory.ready(role)):
            instance = self.directory.least_busy(ready)
        if allowed and (instance is None or not sites.permits(self.directory.site_of(instance))):
            raise sites.refusal(role)
        return self.caller.open(
            role,
            body,
            instance=instance,
            window=window,
            deadline=deadline,
            epoch=epoch,
            sites=allowed,
        )

    def _leave_dark(self, site: str, instances: list[str]) -> None:
        """Fail the streams at the instances of a site that went dark, so that they move at once."""
        log.warning("site %s is dark: none of its %d instances is heard", site, len(instances))
        for instance in instances:
            self.caller.lost(instance, f"its site {site} is dark")

    # ------------------------------------------------------------------------------------- presence
    @property
    def state(self) -> str:
        """Return the state of this instance."""
        return self.calls.state

    def set_state(self, state: str) -> None:
        """Set the state and announce it: starting → warming → ready → draining → stopped."""
        self.calls.state = state
        self.heartbeat()

    def heartbeat(self) -> None:
        """Send a heartbeat with the current state, models and load."""
        models, load = self.presence()
        beat = Heartbeat(
            v=PROTOCOL,
            role=self.role,
            instance=self.instance,
            state=self.state,
            seq=self._beats,
            models=models,
            load=self._vitals.read() | self._counts() | load,
            host=HOST,
            site=self.site,
            every=round(self.directory.period, 2),
            pid=os.getpid(),
            start=round(START.seconds, 3),
            offers=self.offers(),
        )
        self._beats += 1
        self._since_beat = 0.0
        self._events.put(subjects.heartbeat(self.instance), encode(beat))

    async def _expire_silent(self, elapsed: float) -> None:
        await self.directory.tick(elapsed if self.broker.settled else 0.0)

    def _counts(self) -> dict[str, float]:
        calls = self.calls
        return {
            "active": float(len(calls.active)),
            "requests": float(calls.requests),
            "unread": float(calls.unread),
            **{
                wanted_key(role, model): float(count)
                for (role, model), count in self.directory.wanted.items()
            },
            **{
                keep_key(role, model): seconds
                for (role, model), seconds in self.directory.kept.items()
            },
        }

    async def _beat_when_due(self, elapsed: float) -> None:
        self._since_beat += elapsed
        if self._since_beat >= self.directory.period - 0.01:
            self.heartbeat()

    def _on_control(self, message: Message) -> None:
        pong = self.calls.on_control(message)
        if pong is not None and message.reply:
            self._replies.put(message.reply, encode(pong))

    # --------------------------------------------------------------------------------------- health
    def stats(self) -> dict[str, Any]:
        """Return the counters of the wire; the actor adds its own."""
        dropped = {**self.caller.dropped, **self.calls.dropped, **self.directory.dropped}
        return {
            "state": self.state,
            "active": len(self.calls.active),
            "requests": self.calls.requests,
            "errors": self.calls.errors,
            "streams_open": len(self.caller.streams),
            "messages_out": self.calls.outbox.messages,
            "frames_out": self.calls.outbox.parts,
            "dropped": dropped,
            "loop_lag_seconds": round(self.monitor.lag, 4),
        }

    @property
    def is_busy(self) -> bool:
        """Return True while calls are served here, or streams have not ended."""
        streams = self.caller.streams.values()
        return bool(self.calls.active) or any(not stream.done for stream in streams)

    def check_integrity(self) -> None:
        """Raise RuntimeError if the tables of streams or calls are inconsistent."""
        self.caller.check_integrity()
        self.calls.check_integrity()

    async def close(self) -> None:
        """Announce the stop, cancel what runs, and close both connections, whatever fails before."""
        async with AsyncExitStack() as closing:
            for transport in (self.control, self.frames):
                closing.push_async_callback(transport.close)
            self.set_state("stopped")
            await self.monitor.close()
            await self.caller.close()
            await self.calls.close()
            await self._events.close()
            await self._replies.close()
            for transport in (self.frames, self.control):
                with suppress(TimeoutError):  # a server that does not answer must not fail the stop
                    await transport.flush()


def wanted_key(role: str, model: str) -> str:
    """Return the key of a heartbeat's load that counts the requests waiting for a model."""
    return f"wanted/{role}/{model}"


def keep_key(role: str, model: str) -> str:
    """Return the key of a heartbeat's load that says how long a model is to stay, see `keep`."""
    return f"keep/{role}/{model}"


def _password(config: ProcessConfig, user: str) -> str | Callable[[], str] | None:
    """Return the password, or a callable that reads it for each connection.

    Raises ConfigError if the credentials folder holds no password for the user.
    """
    folder = config.nats_credentials
    if folder is None:
        return config.nats_password
    return PasswordFile(folder, user)
