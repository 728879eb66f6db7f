"""Answer a request of a batch by the endpoint's own handler, without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from motet_gateway.audio.speech import speech_in_json
from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.problems import Problem
from motet_gateway.openai.chat import chat_completions, completions
from motet_gateway.openai.embeddings import embeddings
from motet_gateway.responses.endpoints import create_response
from motet_gateway.tenancy.auth import Caller
from motet_gateway.tenancy.tenant import Tenant
from motet_shared.errors import DeadlineExceeded, StreamBroken, UnsupportedParameter, as_motet_error
from motet_shared.process import telemetry
from motet_shared.wire import sites

from .schema import BatchLine, Endpoint

Handler = Callable[[GatewayContext, Exchange], Awaitable[None]]

HANDLERS: dict[Endpoint, Handler] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/embeddings": embeddings,
    "/v1/responses": create_response,
    "/v1/audio/speech": speech_in_json,
}


class Answer(NamedTuple):
    """A finished answer, or an error that may not occur again: `retry_after` is in seconds.

    `broke`: the error is that the service which worked on it ended.
    """

    status: int
    body: bytes
    retry_after: float | None = None
    broke: bool = False


class _Options(Struct):
    stream: bool | None = None
    background: bool | None = None
    store: bool | msgspec.UnsetType | None = msgspec.UNSET


@dataclass
class _Connection:
    """Act as a client that sends a body and reads the answer."""

    body: bytes
    status: int = 0

    def __post_init__(self) -> None:
        self.answer: list[bytes] = []
        self._sent = False

    async def receive(self) -> MutableMapping[str, Any]:
        if self._sent:
            await asyncio.Event().wait()  # it never leaves
        self._sent = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.answer.append(message.get("body", b""))


async def answer(
    service: GatewayContext, tenant: Tenant, request: BatchLine, request_id: str
) -> Answer:
    """Return the answer to a request, which may be an error."""
    client = _Connection(_unstored(request))
    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
    scope = {"type": "http", "method": "POST", "path": request.url, "headers": headers}
    http = Exchange(scope, client.receive, client.send)
    http.strict = service.config.strict
    http.caller = Caller(tenant)
    token = telemetry.request_id.set(request_id)
    try:
        _check(client.body)
        with sites.only(tenant.rights.sites):
            await HANDLERS[request.url](service, http)  # type: ignore[index]
    except asyncio.CancelledError:
        raise
    except Exception as error:
        problem = Problem.of(error)
        problem.note(request.url)
        known = as_motet_error(error)
        if known.retryable or isinstance(known, DeadlineExceeded):
            broke = isinstance(known, StreamBroken)
            return Answer(problem.status, problem.body(), float(problem.retry_after), broke)
        return Answer(problem.status, problem.body())
    finally:
        telemetry.request_id.reset(token)
    return Answer(client.status, b"".join(client.answer))


def _check(body: bytes) -> None:
    """Raise UnsupportedParameter for what needs a client that waits."""
    options = _options(body)
    for name in ("stream", "background"):
        if getattr(options, name):
            message = f"`{name}` is not supported in a batch; leave it out"
            raise UnsupportedParameter(message, param=name)


def _unstored(request: BatchLine) -> bytes:
    """Return the body of a request, whose response is stored only if it asks for that."""
    body = bytes(request.body).strip()
    if request.url != "/v1/responses" or _options(body).store is not msgspec.UNSET:
        return body
    rest = body[1:].lstrip()
    return b'{"store":false' + (b"" if rest == b"}" else b",") + rest


def _options(body: bytes) -> _Options:
    try:
        return msgspec.json.decode(body, type=_Options)
    except msgspec.MsgspecError:
        return _Options(store=None)  # the endpoint says what is wrong
