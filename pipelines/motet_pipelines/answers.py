"""Record what services answer, so that a pipeline goes on in another process when its own has died.

A process that keeps a request beyond its death sets a `Recorder` with `record_in`. Every pipeline
that calls a service behind it records each batch before it yields it, and begins with the batches
that an earlier process has recorded:

    answers = Answers(request, batches, ends)
    while (batch := await answers.recorded()) is not None:
        yield batch                                # as below
    if answers.end is not None:                    # nothing is behind them
        return
    async with answers.live():                     # the request now says what was received
        async for batch in stream.batches():
            await answers.record(batch)
            yield batch
        await answers.finish(stream.end)

Between two of these calls, all effects of a batch take place: so what is behind it is the same in
both processes. Without a recorder, nothing is recorded.

What else differs from process to process, such as the time and what a deadline has cut off, is
noted under a name: `once`, `noted`.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import msgspec

from motet_shared.errors import MotetError, from_wire
from motet_shared.wire.epochs import NO_EPOCH, Epoch

Batch = TypeVar("Batch")
Ending = TypeVar("Ending")
Noted = TypeVar("Noted")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_DIGEST = 16  # bytes


class RecordedStream(Protocol):
    """The records of one request to a service.

    `end`, or `error`: the last of them, once all were read.
    """

    end: bytes | None
    error: bytes | None

    async def next(self) -> bytes | None:
        """Return the next recorded batch once what was recorded before it has had its effect.

        None: there is no further one.
        """

    @property
    def is_live(self) -> bool:
        """Return True if all that an earlier process has recorded is read, and a batch can be recorded at once."""

    async def append(self, data: bytes) -> None:
        """Record a batch; waits while it can have no effect."""

    def append_now(self, data: bytes) -> None:
        """Record a batch that can have its effect; `is_live` is True."""

    async def close(self, data: bytes, *, failed: bool) -> None:
        """Record the end, or an error."""


class Recorder(Protocol):
    """What keeps the records of one client's request."""

    def open(self, digest: bytes) -> RecordedStream | None:
        """Return the stream of a request to a service, known by its digest; None: not kept."""

    def memo(self, name: str) -> bytes | None:
        """Return the value that an earlier process has noted under a name, None without any."""

    def note(self, name: str, value: bytes) -> None:
        """Note a value under a name that is unique in the client's request."""

    def epoch(self, given: Epoch) -> Epoch:
        """Return the epoch of work of the epoch `given` that this process asks the services for."""


class WireError(NamedTuple):
    """An error as `from_wire` takes it."""

    code: str
    message: str
    retryable: bool
    param: str | None


def wire_error(error: MotetError) -> WireError:
    return WireError(error.code, error.message, error.retryable, error.param)


_current: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
record_in = _current.set
_decode_error = msgspec.msgpack.Decoder(WireError).decode


class Answers(Generic[Batch, Ending]):
    """The answers to one request of the current task. `end`: the recorded end, once it is read."""

    end: Ending | None = None

    def __init__(
        self,
        request: Any,
        batches: msgspec.msgpack.Decoder[Batch],
        ends: msgspec.msgpack.Decoder[Ending],
    ):
        """Begin with what is recorded.

        request: without what differs in another process, such as references to blobs.
        """
        self._batches, self._ends = batches, ends
        self._recorder = _current.get()
        self._stream = None if self._recorder is None else self._recorder.open(_digest(request))

    @property
    def is_live(self) -> bool:
        """Return True if `record_now` may be called."""
        return self._stream is None or self._stream.is_live

    def epoch(self, given: Epoch = NO_EPOCH) -> Epoch:
        """Return the epoch with which to ask the service: it ends what an earlier process asked.

        Otherwise a service computes that beside what goes on, which is then rounded differently
        where rows of a step are computed together.
        """
        if self._recorder is None or self._stream is None:
            return given
        return self._recorder.epoch(given)

    async def recorded(self) -> Batch | None:
        """Return the next recorded batch, None behind the last. Raises a recorded error."""
        stream = self._stream
        if stream is None:
            return None
        if (data := await stream.next()) is not None:
            return self._batches.decode(data)
        if stream.error is not None:
            raise from_wire(*_decode_error(stream.error))
        if stream.end is not None:
            self.end = self._ends.decode(stream.end)
        return None

    @asynccontextmanager
    async def live(self) -> AsyncIterator[None]:
        """Record an error of the block, in which the service is called."""
        try:
            yield
        except MotetError as error:
            if self._stream is not None:
                await self._stream.close(_encode(wire_error(error)), failed=True)
            raise

    async def record(self, batch: Batch) -> None:
        """Record a batch before it has an effect."""
        if self._stream is not None:
            await self._stream.append(_encode(batch))

    def record_now(self, batch: Batch) -> None:
        """Record a batch whose effects need not be waited for, and all come before the next record."""
        if self._stream is not None:
            self._stream.append_now(_encode(batch))

    async def finish(self, end: Ending) -> None:
        """Record the end."""
        if self._stream is not None:
            await self._stream.close(_encode(end), failed=False)


def noted(name: str, value: Noted) -> Noted:
    """Return what an earlier process has noted under `name`, else note `value` and return it.

    It is a number, a text, or lists and mappings of them.
    """
    recorder = _current.get()
    if recorder is None:
        return value
    if (memo := recorder.memo(name)) is not None:
        return cast(Noted, _decode(memo))
    recorder.note(name, _encode(value))
    return value


def was_noted(name: str) -> bool:
    """Return True if an earlier process has noted a value under `name`."""
    recorder = _current.get()
    return recorder is not None and recorder.memo(name) is not None


async def once(name: str, compute: Callable[[], Awaitable[Noted]]) -> Noted:
    """Return what an earlier process has noted under `name`, else compute it, and note it."""
    recorder = _current.get()
    if recorder is not None and (memo := recorder.memo(name)) is not None:
        return cast(Noted, _decode(memo))
    value = await compute()
    if recorder is not None:
        recorder.note(name, _encode(value))
    return value


def _digest(request: Any) -> bytes:
    return hashlib.blake2b(_encode(request), digest_size=_DIGEST).digest()
