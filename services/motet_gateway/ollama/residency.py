"""Load models that are loaded on demand, let them go, and set how long they stay (`keep_alive`).

Memory is shared by all tenants, so only an operator's key decides how long a model stays; with
others `keep_alive` is ignored, and named in the response.
"""

from __future__ import annotations

from typing import Any

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.problems import Forbidden
from motet_shared.errors import BadRequest
from motet_shared.wire.instances import pick

from .duration import seconds_of
from .reply_lines import Kind, now
from .schema import ReplyFields


def keep(
    service: GatewayContext,
    http: Exchange,
    model: str,
    keep_alive: float | str | None,
    role: str = "decode",
) -> None:
    """Announce how long a model is to stay. Raises BadRequest for what is no duration."""
    if keep_alive is None:
        return
    seconds = seconds_of(keep_alive)
    directory = service.bus.directory
    base = directory.base_of(model)
    if not http.tenant.limits.metrics:
        if not http.ignore("keep_alive"):
            raise _forbidden()
    elif directory.presence.offer(role, base) is not None:
        directory.keep(role, base, seconds)
    else:
        http.ignore("keep_alive")  # the model stays as long as the stack


async def load_or_unload(
    service: GatewayContext, http: Exchange, body: ReplyFields, kind: Kind
) -> None:
    """Answer once a model is loaded, or at once if it is to go (`keep_alive` 0).

    Raises Forbidden and BadRequest for a model that cannot be unloaded.
    """
    if body.keep_alive is not None and seconds_of(body.keep_alive) == 0:
        _check_unloadable(service, http, body.model)
        keep(service, http, body.model, body.keep_alive)
        await http.reply(200, msgspec.json.encode(_moved(kind, body.model, "unload")))
        return
    keep(service, http, body.model, body.keep_alive)
    with await http.tenant.take(1):
        async with http.while_connected():
            base = service.bus.directory.base_of(body.model)
            await pick(service.bus, "decode", base, patience=service.config.request_timeout)
    await http.reply(200, msgspec.json.encode(_moved(kind, body.model, "load")))


def _check_unloadable(service: GatewayContext, http: Exchange, model: str) -> None:
    if not http.tenant.limits.metrics:
        raise _forbidden()
    directory = service.bus.directory
    if directory.presence.offer("decode", directory.base_of(model)) is None:
        message = f"`keep_alive`: {model!r} is not loaded on demand and stays; leave it out"
        raise BadRequest(message, param="keep_alive")


def _forbidden() -> Forbidden:
    return Forbidden(
        "`keep_alive`: this key may not decide how long models stay; leave it out, or set"
        " `metrics = true` for its tenant",
        param="keep_alive",
    )


def _moved(kind: Kind, model: str, reason: str) -> dict[str, Any]:
    """Return the answer to a request without a prompt."""
    empty: dict[str, Any] = (
        {"message": {"role": "assistant", "content": ""}} if kind == "chat" else {"response": ""}
    )
    head = {"model": model, "created_at": now(), **empty}
    return head | {"done": True, "done_reason": reason}
