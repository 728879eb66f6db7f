"""Tell clients where a model stands that is loaded on demand.

Requests for such a model wait. A client that does not want to sends `Prefer: wait=SECONDS` (RFC
7240), and gets 503 with Retry-After if loading is expected to take longer; one that streams reads
comments of server-sent events meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

import msgspec

from motet_gateway.http.asgi import header
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.problems import ModelLoading
from motet_shared.messages import Offer
from motet_shared.wire.discovery import Directory

T = TypeVar("T")

NOTICE_EVERY = 0.5  # seconds between two comments of a stream
_WAIT = re.compile(rb"(?:^|[,;])\s*wait\s*=\s*\"?(\d{1,9})\"?\s*(?:[,;]|$)", re.IGNORECASE)


def unloaded(directory: Directory, role: str, model: str) -> Offer | None:
    """Return where a model stands that is loaded on demand; None if it is ready or none of those."""
    base = directory.base_of(model)
    offer = directory.presence.offer(role, base)
    return None if offer is None or directory.ready(role, model=base) else offer


def check_wait(http: Exchange, directory: Directory, role: str, model: str) -> None:
    """Raise ModelLoading if a model is expected later than `Prefer: wait` allows.

    The request is noted first, so that a client that comes again finds the model.
    """
    asked = _WAIT.search(header(http.scope, b"prefer"))
    if asked is None or (offer := unloaded(directory, role, model)) is None:
        return
    if offer.seconds <= int(asked[1]):
        return
    directory.want_soon(role, directory.base_of(model))
    message = f"model {model!r} is {described(offer)}; retry after {offer.seconds:.0f} s"
    raise ModelLoading(message, max(1, math.ceil(offer.seconds)))


def described(offer: Offer) -> str:
    """Return where a model stands, for people."""
    share = f" ({offer.share:.0%})" if offer.stage == "loading" else ""
    return f"{offer.stage}{share}"


def state_of(offer: Offer) -> dict[str, Any]:
    """Return where a model stands, as `loading` of `/v1/models` and of comments."""
    found = {"stage": offer.stage, "share": offer.share, "seconds": offer.seconds}
    return found | ({"problem": offer.problem} if offer.problem else {})


async def while_loading(
    http: Exchange, directory: Directory, role: str, model: str, batches: AsyncGenerator[T, None]
) -> AsyncIterator[T]:
    """Yield what `batches` yields; write comments until the first comes or the model is ready."""
    first = asyncio.ensure_future(anext(batches))
    try:
        while not first.done() and (offer := unloaded(directory, role, model)) is not None:
            await http.write(b": loading " + msgspec.json.encode(state_of(offer)) + b"\n\n")
            await asyncio.wait({first}, timeout=NOTICE_EVERY)
        try:
            yield await first
        except StopAsyncIteration:
            return
    finally:
        if not first.done():
            first.cancel()
            await asyncio.wait({first})
    async for batch in batches:
        yield batch
