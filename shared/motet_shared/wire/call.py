"""Serve streaming calls: accept, send within credit, cancel, and send keepalives.

A handler is a coroutine that receives a `Call`. The stream ends when it returns and fails when it
raises; it is cancelled when the caller cancels, the caller's process dies, or the deadline passes.
Engines that produce items for many calls at once use `push` from one callback instead of `send`,
and respect `credit_left` themselves.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from motet_shared.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    Draining,
    MalformedMessage,
    MotetError,
    NoAllowedSite,
    Overloaded,
    ProtocolMismatch,
    StreamBroken,
    as_motet_error,
)
from motet_shared.messages import (
    FOREVER,
    PROTOCOL,
    Accepted,
    Body,
    Cancel,
    Credit,
    End,
    Error,
    Frame,
    Frames,
    Item,
    Keepalive,
    Open,
    Pong,
    Usage,
    decode_controls,
    decode_feeds,
    decode_open,
    encode,
)
from motet_shared.process import telemetry
from motet_shared.process.clock import Clock

from . import sites, subjects
from .epochs import Epoch, Epochs
from .outbox import Outbox
from .transport import Message, Transport
from .uplink import InputBuffer

log = logging.getLogger(__name__)

KEEPALIVE_AFTER = 0.2  # seconds without a frame until a keepalive is sent
UNREAD_AFTER = 1.0  # seconds without credit until a caller counts as not reading

Handler = Callable[["Call", Any], Awaitable[None]]


class Call:
    """State of one stream that this process serves."""

    def __init__(self, calls: Calls, request: Open, now: float):
        self._calls = calls
        self.caller = request.caller
        self.stream = request.stream
        self.epoch = Epoch(request.session, request.epoch)
        self.sites = request.sites
        self.request = request.body
        self.id = f"{request.caller}/{request.stream}"
        self.expires = (
            None if request.deadline_ms is None else now + min(request.deadline_ms, FOREVER) / 1000
        )
        self.credit_total = request.credit
        self.sent = 0
        self.on_credit: Callable[[int], None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.quiet = 0.0  # seconds since the last frame, in ticks of the monitor
        self.expired = False
        self.starved = 0.0  # seconds without credit, in ticks of the monitor
        self._subject = subjects.frames_to(request.caller)
        # Bypasses `_put`: a grant carries no item count, so it must not replace a keepalive.
        self.intake = InputBuffer(self.stream, functools.partial(calls.outbox.put, self._subject))
        self._credit: asyncio.Event = asyncio.Event()
        self._status = "stop"
        self._usage: Usage | None = None
        self._timing: dict[str, float] = {}
        self._stop = ""

    @property
    def operation(self) -> str:
        """Return the operation's name: the tag of the request."""
        return str(type(self.request).__struct_config__.tag)

    @property
    def credit_left(self) -> int:
        """Return how many items may be sent now."""
        return self.credit_total - self.sent

    def remaining(self) -> float | None:
        """Return the seconds until the deadline, None without one."""
        return None if self.expires is None else self.expires - self._calls.clock.now()

    async def send(self, body: Body) -> None:
        """Queue one item; wait while there is no credit. This wait is the backpressure."""
        while self.sent >= self.credit_total:
            self._credit.clear()
            await self._credit.wait()
        self.push(body)

    def received(self) -> AsyncIterator[bytes]:
        """Yield the caller's input in order until its `end_input`; not reading blocks the caller.

        Raises StreamGap if input is missing; a handler that lets it propagate reports it to the
        caller.
        """
        return self.intake.read()

    def push(self, body: Body) -> None:
        """Queue one item without waiting; the caller of `push` must respect `credit_left`."""
        self._put(Item(self.stream, self.sent, body))
        self.sent += 1

    def finish(
        self,
        status: str = "stop",
        usage: Usage | None = None,
        timing: dict[str, float] | None = None,
        stop: str = "",
    ) -> None:
        """Set the contents of the End frame, which is sent when the handler returns."""
        self._status, self._usage, self._timing, self._stop = status, usage, timing or {}, stop

    def _put(self, frame: Frame) -> None:
        self.quiet = 0.0
        self._calls.outbox.put(self._subject, frame)

    def accept(self) -> None:
        """Send Accepted to the caller."""
        self._put(Accepted(self.stream))

    def keepalive(self) -> None:
        """Send a Keepalive with the number of items sent so far."""
        self._put(Keepalive(self.stream, self.sent))

    def grant(self, total: int) -> None:
        """Raise the credit to `total` items since the start; lower totals are ignored."""
        if total > self.credit_total:
            self.credit_total = total
            self._credit.set()
            if self.on_credit is not None:
                self.on_credit(total)

    def end(self) -> None:
        """Send the End frame."""
        self._put(End(self.stream, self.sent, self._status, self._usage, self._timing, self._stop))

    def error(self, error: MotetError) -> None:
        """Send an Error frame."""
        self._put(
            Error(self.stream, self.sent, error.code, error.message, error.retryable, error.param)
        )


class Calls:
    """Manage all streams that this process serves, and receive opens, controls and feeds."""

    def __init__(
        self,
        instance: str,
        frames: Transport,
        replies: Outbox,
        clock: Clock,
        max_active: int = 1024,
        site: str = "",
    ):
        """Create the table of calls of an instance at `site`.

        `replies` sends bytes to reply subjects: NATS permits a reply only on the connection that
        received the request.
        """
        self.instance = instance
        self._replies = replies
        self.clock = clock
        self.max_active = max_active
        self.site = site
        self.state = "starting"
        self.active: dict[tuple[str, int], Call] = {}
        self.handlers: dict[str, Handler] = {}
        self.dropped: dict[str, int] = {}
        self.requests = 0
        self.errors = 0
        self.last_error = ""
        self.busy_seconds = 0.0
        self._finished: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._epochs = Epochs()
        self._idle = asyncio.Event()
        self._idle.set()
        self.outbox = Outbox(
            frames, lambda parts: encode(Frames(PROTOCOL, instance, parts)), _oversize
        )

    def start(self) -> None:
        """Start the outbox."""
        self.outbox.start()

    # -------------------------------------------------------------------------------------- opening
    def on_open(self, message: Message) -> None:
        """Handle an Open, which may be a repeated one."""
        try:
            request = read_open(message.data)
        except BadRequest as error:
            self._drop(error.code)
            self._reply_error(message.reply, error)
            return
        key = (request.caller, request.stream)
        if (call := self.active.get(key)) is not None:
            call.accept()  # the first Accepted was lost
        elif key in self._finished:
            # All that it sent may have been lost, with its caller's connection.
            ended = Call(self, request, self.clock.now())
            ended.error(StreamBroken(f"{self.instance} has ended {ended.id} already"))
        else:
            self._admit(key, request, message)

    def _admit(self, key: tuple[str, int], request: Open, message: Message) -> None:
        call = Call(self, request, self.clock.now())
        if self._epochs.note(call.epoch):
            self._end_older(call.epoch)
        refusal = self._refusal(call)
        if refusal is not None:
            call.error(refusal)
            self._remember(key)
            return
        self.requests += 1
        self.active[key] = call
        self._idle.clear()
        call.accept()
        call.task = asyncio.get_running_loop().create_task(self._serve(call, message.headers))
        began = self.clock.now()
        call.task.add_done_callback(lambda _: self._ended(key, began))

    def _refusal(self, call: Call) -> MotetError | None:
        """Return the error with which a call is refused, or None if it is served."""
        if call.operation not in self.handlers:
            return BadRequest(f"{self.instance} has no operation {type(call.request).__name__!r}")
        if self.state != "ready":
            return Draining(f"{self.instance} is {self.state} and takes no new work")
        if call.sites and self.site not in call.sites:
            return NoAllowedSite(
                f"sites: {self.instance} is at {self.site or 'no site'}, not at {', '.join(call.sites)}",
                param="sites",
            )
        if self._epochs.is_over(call.epoch):
            return _over(call.epoch, self._epochs.newest(call.epoch.session))
        if len(self.active) >= self.max_active:
            return Overloaded(
                f"{self.instance} already serves {len(self.active)} calls (max_active)"
            )
        return None

    def _end_older(self, epoch: Epoch) -> None:
        """End calls of older epochs of a session: their results are out of date."""
        for call in list(self.active.values()):
            if call.epoch.session == epoch.session and call.epoch.number < epoch.number:
                call.error(_over(call.epoch, epoch.number))
                self.cancel(call)

    async def _serve(self, call: Call, headers: dict[str, str] | None) -> None:
        # The context variable is set for this task only.
        telemetry.request_id.set(getattr(call.request, "request_id", "") or call.id)
        try:
            name = f"{subjects.role_of(self.instance)}.{call.operation}"
            parent = telemetry.extract(headers)
            with telemetry.span(name, parent=parent), sites.only(call.sites):
                await self.handlers[call.operation](call, call.request)
            call.end()
        except asyncio.CancelledError:
            if call.expired:
                call.error(DeadlineExceeded("the deadline passed before the stream was complete"))
        except Exception as error:
            self._failed(call, error)

    def _ended(self, key: tuple[str, int], began: float) -> None:
        """Release a call after its task is done.

        Runs as a done callback, since a task that is cancelled before its first step runs nothing
        of `_serve`.
        """
        self.busy_seconds += self.clock.now() - began
        self.active.pop(key, None)
        self._remember(key)
        if not self.active:
            self._idle.set()

    def _failed(self, call: Call, error: Exception) -> None:
        wire = as_motet_error(error)
        self.errors += 1
        self.last_error = wire.message
        if wire.code == "internal":
            log.exception("call %s failed", call.id)
        call.error(wire)

    def _remember(self, key: tuple[str, int]) -> None:
        self._finished[key] = None
        if len(self._finished) > 8192:
            self._finished.popitem(last=False)

    # -------------------------------------------------------------------------------------- control
    def on_control(self, message: Message) -> Pong | None:
        """Apply the credits and cancels of one caller.

        An empty list is a probe; returns the Pong for a probe, else None.
        """
        try:
            batch = decode_controls(message.data)
        except ValueError:
            self._drop("malformed_controls")
            return None
        if batch.v != PROTOCOL:
            self._drop("protocol_mismatch")
            return None
        for control in batch.controls:
            key = (batch.caller, control.stream)
            call = self.active.get(key)
            if isinstance(control, Cancel):
                if call is not None:
                    self.cancel(call)
                else:
                    self._remember(key)  # the Cancel may overtake its Open
            elif call is not None and isinstance(control, Credit):
                call.grant(control.total)
        return None if batch.controls else Pong(PROTOCOL, self.instance, self.state)

    def on_feeds(self, message: Message) -> None:
        """Pass feeds of one caller to the intakes of its streams."""
        try:
            batch = decode_feeds(message.data)
        except ValueError:
            self._drop("malformed_feeds")
            return
        if batch.v != PROTOCOL:
            self._drop("protocol_mismatch")
            return
        for feed in batch.feeds:
            key = (batch.caller, feed.stream)
            if (call := self.active.get(key)) is not None:
                call.intake.on_feed(feed)
            elif key not in self._finished:
                self._drop("stray_feeds")

    def cancel(self, call: Call) -> None:
        """Cancel a call once: a second cancel would interrupt the handler's cleanup."""
        if call.task is not None and not call.task.cancelling():
            call.task.cancel()

    def caller_lost(self, caller: str) -> None:
        """Cancel all calls of a dead caller."""
        for (owner, _), call in list(self.active.items()):
            if owner == caller:
                self.cancel(call)

    @property
    def unread(self) -> int:
        """Return the number of calls without credit for `UNREAD_AFTER` seconds or more."""
        return sum(call.starved >= UNREAD_AFTER for call in self.active.values())

    def callers(self) -> set[str]:
        """Return the instance ids of all callers with active calls."""
        return {caller for caller, _ in self.active}

    def tick(self, elapsed: float) -> None:
        """Advance time by `elapsed` seconds: send due keepalives and cancel calls past a deadline."""
        now = self.clock.now()
        for call in list(self.active.values()):
            call.quiet += elapsed
            call.starved = call.starved + elapsed if call.credit_left <= 0 else 0.0
            if call.expires is not None and now >= call.expires and not call.expired:
                call.expired = True
                self.cancel(call)
            elif call.quiet >= KEEPALIVE_AFTER - 0.01:
                call.keepalive()

    # --------------------------------------------------------------------------------------- ending
    async def drain(self, timeout: float, hurry: asyncio.Event | None = None) -> None:
        """Wait until all calls are complete, at most `timeout` seconds or until `hurry` is set.

        The remaining calls fail with Draining and are cancelled.
        """
        waits = [
            asyncio.ensure_future(event.wait())
            for event in (self._idle, hurry)
            if event is not None
        ]
        try:
            await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not self._idle.is_set():
            for call in list(self.active.values()):
                call.error(Draining(f"{self.instance} stops; the call may be repeated elsewhere"))
                self.cancel(call)
            async with asyncio.timeout(5):
                await self._idle.wait()

    async def close(self) -> None:
        """Cancel all calls and close the outbox."""
        tasks = [call.task for call in self.active.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.outbox.close()

    def check_integrity(self) -> None:
        """Raise RuntimeError if a call is listed as active after its task is done."""
        if stale := [c.id for c in self.active.values() if c.task is not None and c.task.done()]:
            raise RuntimeError(f"calls {stale} are listed as active but are over")

    def _drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def _reply_error(self, reply: str, error: MotetError) -> None:
        if reply:
            frame = Error(0, 0, error.code, error.message, error.retryable, error.param)
            self._replies.put(reply, encode(Frames(PROTOCOL, self.instance, [frame])))


def _over(epoch: Epoch, newest: int) -> Cancelled:
    return Cancelled(
        f"epoch {epoch.number} of session {epoch.session} is over: epoch {newest} has begun"
    )


def read_open(data: bytes) -> Open:
    """Decode and validate an Open.

    Raises MalformedMessage with the offending field, and ProtocolMismatch with both versions.
    """
    try:
        request = decode_open(data)
        if request.v == PROTOCOL:
            subjects.role_of(request.caller)
            if request.credit < 0 or request.stream < 0:
                raise ValueError(
                    f"credit and stream must not be negative, got {request.credit} and {request.stream}"
                )
            return request
    except ValueError as error:
        version = _version(data)
        if version in (None, PROTOCOL):
            raise MalformedMessage(f"open cannot be read: {error}") from error
    raise ProtocolMismatch(
        f"open has protocol version {_version(data)!r}, this process speaks {PROTOCOL}"
    )


def _version(data: bytes) -> object:
    try:
        document = msgspec.msgpack.decode(data)
    except (ValueError, RecursionError):
        return None
    return document.get("v") if isinstance(document, dict) else None


def _oversize(frame: Frame, error: MotetError) -> Frame | None:
    """Return the Error that replaces a frame that cannot be sent; None for an Error frame."""
    if isinstance(frame, Error):
        return None
    seq = frame.seq if isinstance(frame, (Item, Keepalive, End)) else 0
    return Error(frame.stream, seq, error.code, error.message)
