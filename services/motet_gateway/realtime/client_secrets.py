"""Serve POST /v1/realtime/client_secrets: a secret with which a browser opens one session."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from motet_gateway.context import GatewayContext
from motet_gateway.http.decoding import Decoder
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.fields import Strict
from motet_gateway.http.json_size import check_json
from motet_gateway.tenancy.client_secrets import LONGEST, SHORTEST, USUAL, ClientSecret
from motet_shared.errors import BadRequest

from .events import SessionPatch
from .prepared_session import PreparedSession, prepare_session
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
_session = msgspec.json.Decoder(SessionPatch).decode


def described(patch: SessionPatch, prepared: PreparedSession) -> str:
    """Return a prepared session in JSON, from which every gateway can prepare it."""
    if prepared.settings.model:
        patch = msgspec.structs.replace(patch, model=prepared.settings.model)
    return msgspec.json.encode(patch).decode()


async def prepared_by(service: GatewayContext, secret: ClientSecret) -> PreparedSession:
    """Return the session of a secret. Raises MotetError if it cannot be had now."""
    prepared = await prepare_session(service, secret.tenant.owner, _session(secret.session))
    return replace(prepared, session_id=secret.session_id)


async def create_client_secret(service: GatewayContext, http: Exchange) -> None:
    """Answer with a secret, when it expires, and the session that it opens."""
    data = await http.body(_MOST_BODY)
    check_json(data, http.tenant)
    try:
        body = _decoder.decode(data, http.hints("realtime"))
    except BadRequest as error:
        raise as_refusal(error, data) from None
    patch = body.session or SessionPatch()
    prepared = await prepare_session(service, http.tenant.owner, patch)
    seconds = (body.expires_after or ExpiresAfter()).seconds
    caller = http.caller
    key = "" if caller is None else caller.key
    issued = await service.client_secrets.issue(
        http.tenant, key, described(patch, prepared), prepared.session_id, seconds
    )
    answer = {
        "value": issued,
        "expires_at": int(time.time()) + seconds,
        "session": prepared.settings.as_session(prepared.session_id),
    }
    await http.reply(200, msgspec.json.encode(answer))
