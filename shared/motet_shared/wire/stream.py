"""Make streaming calls: open, receive items, grant credit, cancel, and detect dead workers.

    stream = bus.open("tokenizer", Chat(...), deadline=30)
    async with stream:                          # leaving early is a remote cancel
        async for bodies in stream.batches():   # everything that has arrived, in order
            ...
    print(stream.end.usage)

While a stream runs, `send` feeds it and `end_input` ends its input: see `uplink`.

A consumer that needs no task of its own for most items sets `sink`: see `Stream.sink`.

A stream that breaks raises a retryable `StreamBroken`; items that were delivered before are in
order and complete. `peers.Monitor` drives time: resends of unanswered opens, deadlines, missed
keepalives, and calls that have ended unheard.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any

from motet_shared.errors import (
    DeadlineExceeded,
    InternalError,
    MotetError,
    StreamBroken,
    StreamGap,
    Unavailable,
    WorkerLost,
    from_wire,
)
from motet_shared.messages import (
    ANSWERS,
    FOREVER,
    PROTOCOL,
    Accepted,
    Body,
    Cancel,
    Controls,
    Credit,
    End,
    Error,
    Feed,
    FeedCredit,
    Feeds,
    Frame,
    Item,
    Keepalive,
    Open,
    decode_frames,
    encode,
)
from motet_shared.process import telemetry
from motet_shared.process.clock import Clock

from . import subjects
from .epochs import NO_EPOCH, Epoch
from .outbox import Outbox
from .transport import Message, Transport
from .uplink import InputSender, split

RESEND_AFTER = 0.25  # seconds without Accepted; doubles with each attempt
OPEN_ATTEMPTS = 5
KEEPALIVE_TIMEOUT = 0.65  # seconds of silence: three keepalives at 200 ms and some slack
# Probes that an instance answers without a frame, until a stream's open is repeated there.
UNHEARD = 4


class Stream:
    """Represent one streaming call, created by `Bus.open`."""

    def __init__(
        self,
        caller: Caller,
        number: int,
        subject: str,
        request: Open,
        window: int,
        expires: float | None,
    ):
        self._caller = caller
        self.number = number
        self.subject = subject
        self.request = request
        self.window = window
        self.expires = expires  # by the caller's clock
        self.instance: str | None = None
        self.end: End | None = None
        # Offered what has arrived while the task that reads `batches` waits. Returns True if it has
        # handled all of it; False, having done nothing, if the task is to do so.
        self.sink: Callable[[list[Body]], bool] | None = None
        self.done = False  # the stream has ended or failed
        self.received = 0  # items that have arrived
        self._taken = 0  # items handed to the consumer
        self._granted = window
        self._regrant = window - window // 2  # number of taken items at which the credit is raised
        self._items: list[Body] = []
        self._kinds = ANSWERS.get(type(request.body))
        self._waiter: asyncio.Future[None] | None = None
        self._error: MotetError | None = None
        self._uplink: InputSender | None = None
        self._started = False
        self.attempts = 0
        self.next_resend = 0.0
        self.silence = 0.0  # seconds since the last frame, in ticks of the monitor
        self.unheard = 0  # probes that the instance has answered since the last frame

    # -------------------------------------------------------------------------- the consumer's face
    async def __aenter__(self) -> Stream:
        try:
            await self.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __str__(self) -> str:
        """Return what is asked, and who serves it."""
        state = "ended" if self.done else "open"
        return f"{type(self.request.body).__name__}@{self.instance or self.subject} ({state})"

    async def start(self) -> None:
        """Send the open; idempotent. Entering the stream's context calls it."""
        if not self._started:
            self._started = True
            await self._caller.send_open(self)

    async def batches(self) -> AsyncIterator[list[Body]]:
        """Yield lists of all items that arrived since the last one; taking them grants credit."""
        await self.start()
        loop = asyncio.get_running_loop()  # looked up once: the call costs a system call
        while True:
            if self._items:
                yield self._take()
            elif not self.done:
                self._waiter = loop.create_future()
                await self._waiter
            elif self._error is not None:
                raise self._error
            else:
                return

    def _take(self) -> list[Body]:
        batch, self._items = self._items, []
        self._taken += len(batch)
        if self._taken >= self._regrant:
            self._grant()
        return batch

    async def __aiter__(self) -> AsyncIterator[Body]:
        async for batch in self.batches():
            for body in batch:
                yield body

    async def aclose(self) -> None:
        """Close the call; if it still runs, send `Cancel` so that the worker frees its memory."""
        self.abort(StreamBroken("the stream was closed by its caller"))
        self._caller.forget(self)

    def abort(self, error: MotetError) -> None:
        """End the stream with an error of this side, and cancel the call, unless it has ended already."""
        if not self.done:
            self.fail(error)
            if self._started:
                self._caller.cancel(self)

    async def send(self, data: bytes) -> None:
        """Feed `data` to the worker in order; wait while the worker is too far behind.

        Raises the stream's error, StreamBroken if the stream has ended without one, and
        RuntimeError after `end_input`.
        """
        uplink = await self._input()
        for part in split(data):
            while not (self.done or uplink.ended or uplink.has_room):
                await uplink.room()
            self._check_open(uplink)
            uplink.push(part)

    async def end_input(self) -> None:
        """Signal the end of the input, which ends the worker's `received()`.

        Idempotent, and allowed after the end of the stream.
        """
        uplink = await self._input()
        if not uplink.ended and not self.done:
            uplink.end()

    async def _input(self) -> InputSender:
        if not self.done:
            await self.start()
        if self._uplink is None:
            self._uplink = InputSender(self.number)
            self._bind_uplink()
        return self._uplink

    def _bind_uplink(self) -> None:
        """Bind the input to the instance that accepted the stream, and to no other."""
        if self._uplink is not None and self.instance is not None and not self.done:
            self._uplink.bind(functools.partial(self._caller.feed, self.instance))

    def _check_open(self, uplink: InputSender) -> None:
        if self._error is not None:
            raise self._error
        if self.done:
            raise StreamBroken(f"stream {self.number} has ended; nothing more can be sent")
        if uplink.ended:
            raise RuntimeError(f"stream {self.number}: send after end_input")

    def tick_uplink(self, elapsed: float) -> None:
        """Advance the input's time by `elapsed` seconds."""
        if self._uplink is not None:
            self._uplink.tick(elapsed)

    def _grant(self) -> None:
        """Raise the credit to a full window once half of it is used.

        Credit is cumulative, so a lost grant is harmless.
        """
        if self.instance is not None and not self.done:
            self._granted = self._taken + self.window
            self._regrant = self._granted - self.window // 2
            self._caller.control(self.instance, Credit(self.number, self._granted))

    # -------------------------------------------------------------------------------- from the wire
    def on_frame(self, sender: str, frame: Frame) -> None:
        """Apply one frame from `sender`; the first frame binds the stream to its instance."""
        self.silence, self.unheard = 0.0, 0
        if self.instance is None:
            self.instance = sender
            self._caller.bind(self)
            self._bind_uplink()
        if isinstance(frame, Item):
            if self._kinds is not None and type(frame.body) not in self._kinds:
                self._reject_item(frame.body)
            elif frame.seq == self.received:
                self.received += 1
                self._items.append(frame.body)
                if self._waiter is not None:
                    if self.sink is None:
                        self._wake()
                    elif len(self._items) == 1:
                        self._caller.offer_later(self)
            elif frame.seq > self.received:
                self._gap(frame.seq)
        elif isinstance(frame, Keepalive):
            if frame.seq > self.received:
                self._gap(frame.seq)
            elif self._granted > self.window:
                # Repeat the grant in case the last one was lost.
                self._caller.control(sender, Credit(self.number, self._granted))
        elif isinstance(frame, End):
            if frame.seq != self.received:
                self._gap(frame.seq)
            else:
                self.end = frame
                self.done = True
                self._wake()
        elif isinstance(frame, FeedCredit):
            if self._uplink is not None:
                self._uplink.grant(frame.total)
        elif isinstance(frame, Error):
            self.fail(from_wire(frame.code, frame.message, frame.retryable, frame.param))

    def offer(self) -> None:
        """Offer what has arrived to the sink; wake the task if that leaves it."""
        waiter = self._waiter
        if waiter is None or waiter.done() or not self._items:
            return  # the task takes it, or is gone
        try:
            handled = self.sink is not None and self.sink(self._items)
        except Exception:  # which the task meets again, and reports
            handled = False
        if handled:
            self._take()
        else:
            self._wake()

    def _gap(self, seq: int) -> None:
        self.fail(
            StreamGap(
                f"stream {self.number}: expected item {self.received}, {self.instance} is at {seq}"
            )
        )
        self._caller.cancel(self)

    def _reject_item(self, body: Body) -> None:
        due = " or ".join(kind.__name__ for kind in self._kinds or ())
        self.fail(
            StreamBroken(
                f"stream {self.number}: {self.instance} sent a {type(body).__name__}, not a {due}"
            )
        )
        self._caller.cancel(self)

    def fail(self, error: MotetError) -> None:
        """End the stream with an error, unless it has ended already."""
        if not self.done:
            self._error = error
            self.done = True
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if self._uplink is not None and self.done:
            self._uplink.wake()


class Caller:
    """Manage all streams that this process has opened, and receive their frames."""

    def __init__(self, instance: str, control: Transport, frames: Transport, clock: Clock):
        self.instance = instance
        self.streams: dict[int, Stream] = {}
        self.by_peer: dict[str, set[Stream]] = {}
        self.dropped: dict[str, int] = {}
        self.on_lost: Callable[[str], None] = lambda instance: None
        # False: a peer without a subscription may still be alive.
        self.peers_are_back: Callable[[], bool] = lambda: True
        self._control = control
        self._clock = clock
        self._next = 0
        self._offered: list[Stream] = []  # whose sinks are called in the next iteration
        self._refused: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._controls = Outbox(control, lambda parts: encode(Controls(PROTOCOL, instance, parts)))
        self._feeds = Outbox(frames, lambda parts: encode(Feeds(PROTOCOL, instance, parts)))

    def start(self) -> None:
        """Start the outboxes of controls and feeds."""
        self._controls.start()
        self._feeds.start()

    async def close(self) -> None:
        """Close all streams and both outboxes."""
        for stream in list(self.streams.values()):
            await stream.aclose()
        await self._feeds.close()
        await self._controls.close()

    def open(
        self,
        role: str,
        body: Any,
        *,
        instance: str | None = None,
        window: int = 64,
        deadline: float | None = None,
        epoch: Epoch = NO_EPOCH,
        sites: tuple[str, ...] = (),
    ) -> Stream:
        """Create a stream without sending its open.

        `sites`: where the work may be done; the caller has chosen `instance` there.

        `window` is the maximum number of items in flight; `deadline` is in seconds until
        completion. Raises ValueError if `window` is below 1.
        """
        if window < 1:
            raise ValueError(f"window must be at least 1 item, got {window}")
        self._next += 1
        op = str(body.__struct_config__.tag)
        request = Open(
            v=PROTOCOL,
            caller=self.instance,
            stream=self._next,
            credit=window,
            body=body,
            session=epoch.session,
            epoch=epoch.number,
            sites=sites,
        )
        subject = subjects.open_at(instance) if instance else subjects.operation(role, op)
        expires = None if deadline is None else self._clock.now() + deadline
        stream = Stream(self, self._next, subject, request, window, expires)
        self.streams[stream.number] = stream
        if instance:
            self.by_peer.setdefault(instance, set()).add(stream)
        return stream

    # -------------------------------------------------------------------------------------- sending
    async def send_open(self, stream: Stream) -> None:
        """Send or resend the open; the receiver deduplicates by (caller, stream)."""
        now = self._clock.now()
        stream.next_resend = now + RESEND_AFTER * 2**stream.attempts
        stream.attempts += 1
        if stream.expires is not None:
            stream.request.deadline_ms = max(1, int(min((stream.expires - now) * 1000, FOREVER)))
        reply = subjects.open_reply(self.instance, stream.number)
        subject = stream.subject if stream.instance is None else subjects.open_at(stream.instance)
        try:
            data = encode(stream.request)
            await self._control.publish(subject, data, reply=reply, headers=telemetry.inject())
        except MotetError as error:
            stream.fail(error)
        except (OverflowError, TypeError) as error:
            stream.fail(
                InternalError(f"{type(stream.request.body).__name__} cannot be sent: {error}")
            )

    def control(self, instance: str, part: Credit | Cancel) -> None:
        """Queue a control for an instance."""
        self._controls.put(subjects.control_at(instance), part)

    def feed(self, instance: str, part: Feed) -> None:
        """Queue a feed for an instance."""
        self._feeds.put(subjects.feeds_to(instance), part)

    def cancel(self, stream: Stream) -> None:
        """Send Cancel to the instance that serves the stream.

        If no instance has accepted yet, its late Accepted is refused when it arrives.
        """
        target = stream.instance or _instance_in(stream.subject)
        if target is not None:
            self.control(target, Cancel(stream.number))

    # ------------------------------------------------------------------------------------ receiving
    def on_frames(self, message: Message) -> None:
        """Dispatch the frames of one message on `inbox.frames`."""
        try:
            batch = decode_frames(message.data)
            subjects.role_of(batch.sender)
        except ValueError:  # msgspec's errors are ValueErrors
            self._drop("malformed_frames")
            return
        if batch.v != PROTOCOL:
            self._drop("protocol_mismatch")
            return
        sender, streams = batch.sender, self.streams
        for frame in batch.frames:
            stream = streams.get(frame.stream)
            if (
                stream is None
                or stream.done
                or (stream.instance is not None and stream.instance != sender)
            ):
                self._refuse(sender, frame)
            else:
                stream.on_frame(sender, frame)

    def on_open_reply(self, message: Message) -> None:
        """Handle a message on `inbox.open.<stream>`.

        It reports no responders, or an error about an open that could not be read.
        """
        stream = (
            self.streams.get(int(tail))
            if (tail := message.subject.rpartition(".")[2]).isdigit()
            else None
        )
        if stream is None or stream.instance is not None:
            return
        if message.no_responders:
            if not self.peers_are_back():
                return  # the open is sent again
            target = _instance_in(stream.subject)
            if target is not None:
                self.on_lost(target)
            stream.fail(Unavailable(f"no instance serves {stream.subject}"))
            return
        try:
            error = next(f for f in decode_frames(message.data).frames if isinstance(f, Error))
        except (ValueError, StopIteration):
            self._drop("malformed_frames")
            return
        stream.fail(from_wire(error.code, error.message, error.retryable, error.param))

    def offer_later(self, stream: Stream) -> None:
        """Offer a stream's items to its sink in the next iteration of the loop.

        All that is received until then is handled at once, as by a task, in one call for all streams.
        """
        if not self._offered:
            asyncio.get_running_loop().call_soon(self._offer)
        self._offered.append(stream)

    def _offer(self) -> None:
        offered, self._offered = self._offered, []
        for stream in offered:
            stream.offer()

    def _refuse(self, sender: str, frame: Frame) -> None:
        """Cancel at the sender of an unexpected frame.

        The sender is a second instance that accepted a resent open, or has not seen the Cancel yet.
        """
        self._drop("stray_frames")
        key = (sender, frame.stream)
        if isinstance(frame, (Accepted, Item, Keepalive)) and (
            key not in self._refused or isinstance(frame, Keepalive)
        ):
            self._refused[key] = None
            if len(self._refused) > 4096:
                self._refused.popitem(last=False)
            self.control(sender, Cancel(frame.stream))

    def _drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    # ------------------------------------------------------------------------------------ the table
    def bind(self, stream: Stream) -> None:
        """List the stream under the instance that accepted it."""
        assert stream.instance is not None
        self.by_peer.setdefault(stream.instance, set()).add(stream)

    def forget(self, stream: Stream) -> None:
        """Remove the stream from all tables."""
        self.streams.pop(stream.number, None)
        for peer in {stream.instance, _instance_in(stream.subject)} - {None}:
            served = self.by_peer.get(str(peer))
            if served is not None:
                served.discard(stream)
                if not served:
                    del self.by_peer[str(peer)]

    def lost(self, instance: str, why: str) -> None:
        """Fail every stream served by `instance` with WorkerLost."""
        for stream in list(self.by_peer.get(instance, ())):
            stream.fail(WorkerLost(f"{instance} is gone: {why}"))
        self.on_lost(instance)

    async def reached(self, instance: str) -> None:
        """Note that an instance has answered a probe; ask again for the streams that it says nothing of.

        It sends keepalives for what it serves. So what is silent has ended, and the end was lost,
        with this process's connection for example: the repeated open is answered with an error.
        """
        for stream in list(self.by_peer.get(instance, ())):
            if stream.instance == instance and not stream.done:
                stream.unheard += 1
                if stream.unheard % UNHEARD == 0:
                    await self.send_open(stream)

    async def tick(self, elapsed: float, period: float) -> None:
        """Advance time by `period` seconds: resend opens, detect silence and passed deadlines.

        `elapsed`: the part of it that counts against silent peers.
        """
        now = self._clock.now()
        for stream in list(self.streams.values()):
            if stream.done or not stream.attempts:
                continue
            if stream.expires is not None and now >= stream.expires:
                stream.fail(DeadlineExceeded("the deadline passed before the stream was complete"))
                self.cancel(stream)
            elif stream.instance is None:
                await self._retry_open(stream, now, elapsed)
            else:
                stream.tick_uplink(period)
                stream.silence += elapsed
                if stream.silence > KEEPALIVE_TIMEOUT:
                    self.cancel(stream)
                    stream.fail(
                        WorkerLost(f"{stream.instance} has been silent for {stream.silence:.1f} s")
                    )
                    self.on_lost(stream.instance)

    async def _retry_open(self, stream: Stream, now: float, counted: float) -> None:
        if now < stream.next_resend:
            return
        # Opens that stay unanswered during a broker outage do not count against the instance.
        if not counted:
            stream.attempts = min(stream.attempts, 2)
        if stream.attempts >= OPEN_ATTEMPTS:
            stream.fail(Unavailable(f"{stream.subject} did not answer {stream.attempts} opens"))
            self.cancel(stream)
        else:
            await self.send_open(stream)

    def check_integrity(self) -> None:
        """Raise RuntimeError if the tables disagree; without open streams they must be empty."""
        listed = {s for served in self.by_peer.values() for s in served}
        if unknown := [s.number for s in listed if s.number not in self.streams]:
            raise RuntimeError(f"streams {unknown} are listed by peer but not open")


def _instance_in(subject: str) -> str | None:
    """Return the instance that an open was addressed to, None for a queue group."""
    parts = subject.split(".")
    return parts[4] if len(parts) == 6 and parts[3] == "i" else None
