"""Serve POST /v1/realtime/client_secrets: a secret with which a browser opens one session."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from motet_gateway.context import GatewayContext
from motet_gateway.http.decoding import Decoder
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.fields import Strict
from motet_gateway.http.json_size import check_json
from motet_gateway.tenancy.client_secrets import LONGEST, SHORTEST, USUAL
from motet_shared.errors import BadRequest

from .events import SessionPatch
from .prepared_session import prepare_session
from .refusals import as_refusal

_MOST_BODY = 2**20


class ExpiresAfter(Strict):
    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Meta(ge=SHORTEST, le=LONGEST)] = USUAL


class ClientSecretBody(Strict):
    """Body of POST /v1/realtime/client_secrets."""

    expires_after: ExpiresAfter | None = None
    session: SessionPatch | None = None


_decoder = Decoder(ClientSecretBody)


async def create_client_secret(service: GatewayContext, http: Exchange) -> None:
    """Answer with a secret, when it expires, and the session that it opens."""
    data = await http.body(_MOST_BODY)
    check_json(data, http.tenant)
    try:
        body = _decoder.decode(data, http.hints("realtime"))
    except BadRequest as error:
        raise as_refusal(error, data) from None
    prepared = await prepare_session(service, http.tenant.owner, body.session or SessionPatch())
    seconds = (body.expires_after or ExpiresAfter()).seconds
    caller = http.caller
    key = "" if caller is None else caller.key
    issued = service.client_secrets.issue(http.tenant, key, prepared, prepared.session_id, seconds)
    answer = {
        "value": issued,
        "expires_at": int(time.time()) + seconds,
        "session": prepared.settings.as_session(prepared.session_id),
    }
    await http.reply(200, msgspec.json.encode(answer))
