"""Serve POST /v1/realtime/calls: an SDP offer in, an SDP answer out, and a call from then on."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from motet_gateway.context import GatewayContext
from motet_gateway.http.asgi import header
from motet_gateway.http.decoding import Decoder
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.fields import Strict
from motet_gateway.http.json_size import check_json
from motet_gateway.http.multipart import read_form
from motet_gateway.http.problems import NotFound
from motet_gateway.http.query import query_of
from motet_gateway.realtime.endpoint import admit_secret
from motet_gateway.realtime.events import SessionPatch
from motet_gateway.realtime.prepared_session import PreparedSession, prepare_session
from motet_gateway.realtime.refusals import as_refusal
from motet_gateway.tenancy.auth import Caller
from motet_gateway.tenancy.client_secrets import ClientSecret
from motet_shared.errors import BadRequest, Overloaded, Unavailable

if TYPE_CHECKING:
    from .call import Call

_SDP = "application/sdp"
_MOST_OFFER = 2**16  # bytes
_MOST_FORM = 2**20  # bytes: the offer, and the settings of the session

_decoder = Decoder(SessionPatch)


class CallNotFound(NotFound):
    code = "call_not_found"


class CallsQuery(Strict):
    model: str = ""


async def create_call(service: GatewayContext, http: Exchange) -> None:
    """Answer an offer. `Location` names the call; it ends with its connection, or by a hang-up."""
    query = query_of(http, CallsQuery)
    sdp, session = await _offer_of(http)
    caller = http.caller
    assert caller is not None
    if not service.config.max_calls:
        raise Unavailable("calls are not taken here (--max-calls); use the WebSocket")
    # aiortc is loaded for the first call: that takes a second, and most gateways never need it.
    made = await asyncio.to_thread(importlib.import_module, f"{__package__}.call")
    _check_calls(service)
    prepared = await _prepared(service, http, caller, query.model, session)
    call: Call = made.Call(service, caller, prepared, http.scope)
    async with _opening(service, caller.secret):
        service.calls[call.id] = call  # `answer` takes it out again if it fails
        answer = await call.answer(sdp)
    location = f"/v1/realtime/calls/{call.id}".encode()
    await http.reply(201, answer.encode(), [(b"location", location)], _SDP.encode())


async def hang_up(service: GatewayContext, http: Exchange) -> None:
    """End a call of the same tenant; a client secret ends its own alone."""
    call_id: str = http.scope["path_params"]["call_id"]
    call: Call | None = service.calls.get(call_id)
    if call is None or not _may_end(http.caller, call):
        message = f"call {call_id[:60]!r} is not here: it is over, or lives in another gateway"
        raise CallNotFound(message, param="call_id")
    await call.end()
    await http.reply(200, b"")


def _may_end(caller: Caller | None, call: Call) -> bool:
    if caller is None or call.session.caller.tenant is not caller.tenant:
        return False
    return caller.secret is None or caller.secret.session_id == call.session.id


async def _offer_of(http: Exchange) -> tuple[str, str | None]:
    """Return the offer, and the session's settings in JSON if they were sent."""
    kind = header(http.scope, b"content-type").split(b";")[0].strip().lower()
    if kind == _SDP.encode():
        return _text(await http.body(_MOST_OFFER)), None
    if not kind.startswith(b"multipart/"):
        message = f"the body must be {_SDP}, or a form with `sdp` and `session`"
        raise BadRequest(message, param="sdp")
    form = await read_form(http, _MOST_FORM, files=("sdp", "session"))
    given = {name: values[-1] for name, values in form.fields.items()}
    given |= {name: _text(values[-1]) for name, values in form.files.items()}
    if unknown := sorted(given.keys() - {"sdp", "session"}):
        raise BadRequest(f"unknown field {unknown[0][:60]!r}; remove it", param=unknown[0][:60])
    if "sdp" not in given:
        raise BadRequest("`sdp` is required: the offer", param="sdp")
    return given["sdp"], given.get("session")


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadRequest("`sdp` and `session` are UTF-8", param="sdp") from None


async def _prepared(
    service: GatewayContext, http: Exchange, caller: Caller, model: str, session: str | None
) -> PreparedSession:
    """Return the session of the call: the secret's, or that of the form."""
    if caller.secret is not None:
        if session is not None:
            message = "`session` is that of the client secret; leave it out"
            raise BadRequest(message, param="session")
        return await admit_secret(service, caller.secret, model)
    service.check_room()
    patch = SessionPatch()
    if session is not None:
        check_json(session, http.tenant)
        try:
            patch = _decoder.decode(session, http.hints("realtime"))
        except BadRequest as error:
            raise as_refusal(error, session) from None
    return await prepare_session(service, http.tenant.owner, patch, model)


def _check_calls(service: GatewayContext) -> None:
    """Raise Overloaded if as many calls are open as may be."""
    if len(service.calls) >= service.config.max_calls:
        raise Overloaded(f"{len(service.calls)} calls are open, the most allowed here; try later")


@asynccontextmanager
async def _opening(service: GatewayContext, secret: ClientSecret | None) -> AsyncIterator[None]:
    """Use up a client secret, unless its session cannot be opened."""
    if secret is not None:
        await service.client_secrets.open(secret)
    try:
        yield
    except BaseException:
        if secret is not None:
            await service.client_secrets.close(secret)
        raise
