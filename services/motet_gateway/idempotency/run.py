"""Run a request with an `Idempotency-Key`: a first attempt, one that takes it over, or a stored reply.

The handler runs unchanged. What it draws (ids, seeds, the time) comes from the request's entry, so
each attempt says the same; what it sends is recorded on its way to the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from motet_gateway.context import GatewayContext
from motet_gateway.http.asgi import ClientGone, Send, header
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.problems import KeyReused, NotFound
from motet_gateway.kept import draws
from motet_gateway.tenancy.deferral import Deferral
from motet_shared.errors import BadRequest, MotetError, StreamBroken

from .entries import MAX_REPLY, Claim, Entries, Mismatch
from .events import EventsBehind, NumberedEvents, parse_id

log = logging.getLogger(__name__)

HEADER, LAST = b"idempotency-key", b"last-event-id"
REPLAYED = (b"idempotent-replayed", b"true")
_EVENTS = b"text/event-stream"
_MAX_KEY = 255  # characters
_PERIOD = 1.0  # seconds between looks whether another gateway has taken a request
_GRACE = 30.0  # seconds in which another attempt may take a request whose client has left

Handler = Callable[[GatewayContext, Exchange], Awaitable[Any]]


async def run(service: GatewayContext, http: Exchange, handler: Handler) -> None:
    """Answer a request by its handler, or as an earlier attempt with the same key was answered.

    Without a key, or without a store, this is the handler alone. Raises KeyReused if the key was used
    for another request, and as the handler does.
    """
    entries, key = service.idempotency, header(http.scope, HEADER).decode("latin-1")
    if not key or entries is None:
        await handler(service, http)
        return
    _check(key)
    last = header(http.scope, LAST).decode("latin-1")
    behind = EventsBehind(parse_id(last)) if last else None
    body = await http.body(service.config.max_body)
    http.put_back(body)
    path = http.scope["path"].encode()
    digest = hashlib.blake2b(path + b"\0" + body, digest_size=16).hexdigest()
    try:
        claim = await entries.claim(http.tenant.owner, key, digest, is_known=bool(last))
    except Mismatch:
        raise KeyReused(
            "Idempotency-Key: it was used for another request; send each request with a key of its own",
            param="Idempotency-Key",
        ) from None
    if claim.entry.is_done:
        with contextlib.suppress(NotFound):  # it has expired in between: run it again
            await _replay(http, claim, await entries.reply(claim), behind)
            return
    await _attempt(service, entries, http, handler, claim, behind)


def _check(key: str) -> None:
    """Raise BadRequest unless a key has an acceptable form."""
    if len(key) > _MAX_KEY or not key.isprintable():
        raise BadRequest(
            f"`Idempotency-Key`: must be at most {_MAX_KEY} printable characters, such as a UUID",
            param="Idempotency-Key",
        )


async def _replay(http: Exchange, claim: Claim, reply: bytes, behind: EventsBehind | None) -> None:
    """Send a stored reply, or what is behind an event of it."""
    kind = claim.entry.content_type.encode("latin-1")
    if behind is not None and kind.startswith(_EVENTS):
        reply = behind.feed(reply)
    await http.reply(200, reply, [REPLAYED], kind)


async def _attempt(
    service: GatewayContext,
    entries: Entries,
    http: Exchange,
    handler: Handler,
    claim: Claim,
    behind: EventsBehind | None,
) -> None:
    """Run the handler under a claim, and store what it sends."""
    entry = claim.entry
    draws.use(draws.Draws(entry.secret, 0, lambda: entry.created))
    http.is_retried = not claim.is_new
    is_mine = True

    async def store(recorder: Recorder) -> None:
        nonlocal is_mine
        is_mine = await _store(entries, claim, recorder)

    http.send_through(Recorder(behind, store).sending)
    deferral = Deferral()

    def settle_later() -> None:
        longest = service.config.request_timeout
        _in_background(_settle_later(entries, claim, deferral, longest))

    try:
        with deferral:
            async with _while_mine(entries, claim):
                await handler(service, http)
    except ClientGone:
        settle_later()
        raise
    except Superseded:
        settle_later()
        raise StreamBroken(
            "another request with this Idempotency-Key has taken over; read its reply"
        ) from None
    except Exception as error:
        deferral.settle()
        if isinstance(error, BadRequest) and claim.is_new:
            with contextlib.suppress(MotetError):
                await entries.forget(claim)
        raise
    (deferral.settle if is_mine else settle_later)()


async def _store(entries: Entries, claim: Claim, recorder: Recorder) -> bool:
    """Store a whole reply; return False if another attempt has taken the request."""
    if (reply := recorder.reply) is None:
        return True
    try:
        return await entries.finish(claim, recorder.content_type, reply)
    except MotetError as error:
        log.warning("a reply cannot be stored under its Idempotency-Key: %s", error)
        return True


class Recorder:
    """Record a response on its way to the client, with ids in its events.

    The client gets what is behind the event that it has had. `whole` is waited for before the client
    gets the end: a reply that it has had is stored.
    """

    def __init__(self, behind: EventsBehind | None, whole: Callable[[Recorder], Awaitable[None]]):
        self._behind, self._whole = behind, whole
        self._numbered: NumberedEvents | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._is_whole = False
        self._status = 0
        self.content_type = ""

    @property
    def reply(self) -> bytes | None:
        """Return the body of a whole successful response; None: there is none, or it is too large."""
        has_failed = self._numbered is not None and self._numbered.has_failed
        if not self._is_whole or self._status != 200 or has_failed or self._size > MAX_REPLY:
            return None
        return b"".join(self._parts)

    def sending(self, send: Send) -> Send:
        """Return the function through which the response is sent."""

        async def recorded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._begin(message)
            elif message["type"] == "http.response.body":
                message = {**message, "body": self._body(message.get("body", b""))}
                self._is_whole = not message.get("more_body", False)
                if self._is_whole:
                    await self._whole(self)
            await send(message)

        return recorded

    def _begin(self, message: MutableMapping[str, Any]) -> None:
        self._status = message["status"]
        kinds = [value for name, value in message["headers"] if name == b"content-type"]
        self.content_type = kinds[0].decode("latin-1") if kinds else ""
        if self._status == 200 and kinds and kinds[0].startswith(_EVENTS):
            self._numbered = NumberedEvents()

    def _body(self, data: bytes) -> bytes:
        """Record a part of the body; return what the client gets of it."""
        if self._numbered is not None:
            data = self._numbered.feed(data)
        self._size += len(data)
        if self._size <= MAX_REPLY:
            self._parts.append(data)
        else:
            self._parts.clear()
        if self._numbered is not None and self._behind is not None:
            return self._behind.feed(data)
        return data


class Superseded(Exception):
    """Signal that another attempt has taken the request."""


@asynccontextmanager
async def _while_mine(entries: Entries, claim: Claim) -> AsyncIterator[None]:
    """Cancel the block when another attempt takes the request, and raise Superseded then."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("an attempt needs a task")
    superseded = False

    async def watch() -> None:
        nonlocal superseded
        while await _is_mine(entries, claim):  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(_PERIOD)
        superseded = True
        task.cancel()

    watcher = asyncio.create_task(watch(), name="idempotency")
    try:
        yield
    except asyncio.CancelledError:
        if not superseded or task.uncancel() > 0:
            raise
        raise Superseded from None
    finally:
        watcher.cancel()


async def _is_mine(entries: Entries, claim: Claim) -> bool:
    """Return True if no other attempt is known to have taken the request."""
    try:
        return await entries.is_mine(claim)
    except MotetError:  # the store is away
        return True


async def _is_answered(entries: Entries, claim: Claim) -> bool:
    """Return True if another attempt is known to have stored its reply."""
    try:
        return await entries.is_answered(claim)
    except MotetError:  # the store is away
        return False


async def _settle_later(entries: Entries, claim: Claim, deferral: Deferral, longest: float) -> None:
    """Charge an attempt, unless another one takes the request and stores its reply.

    One that has the request may still be refused or dropped, and costs nothing then. longest:
    seconds that a reply may take.
    """
    deferral.trim()
    now = asyncio.get_running_loop().time
    began, is_mine = now(), True
    try:
        while now() - began < (_GRACE if is_mine else _GRACE + longest):
            is_mine = is_mine and await _is_mine(entries, claim)
            if not is_mine and await _is_answered(entries, claim):
                deferral.cancel()
                return
            await asyncio.sleep(_PERIOD)
    finally:
        deferral.settle()


_background: set[asyncio.Task[None]] = set()


def _in_background(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)
