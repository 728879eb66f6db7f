"""The door of `/v1/realtime`: the upgrade succeeds, and what is wrong is said on the socket."""

from __future__ import annotations

from urllib.parse import parse_qs

from motet_shared import telemetry
from motet_shared.errors import BadRequest, Draining, MotetError, Overloaded, Unavailable, UnsupportedParameter

from ..asgi import ClientGone, Receive, Scope, Send, request_id
from ..problems import Forbidden, Problem, Unauthorized
from ..service import Service
from .audio_settings import Speech
from .channel import Channel
from .session import Session
from .settings import Kind

_CLOSE_CODES: tuple[tuple[type[MotetError], int], ...] = (
    (Unauthorized, 3000),
    (Forbidden, 3000),
    (Draining, 1012),
    (Overloaded, 1013),
    (Unavailable, 1013),
)
_BAD_REQUEST = 4000


async def realtime(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """One connection, from its upgrade to its end."""
    name = request_id(scope)
    token = telemetry.request_id.set(name)
    await receive()
    subprotocol = "realtime" if "realtime" in scope.get("subprotocols", ()) else None
    channel = Channel(scope, send)
    try:
        await channel.accept(subprotocol, [(b"x-request-id", name.encode())])
        await _converse(service, scope, receive, channel)
    except ClientGone:
        pass  # nobody is left to tell
    finally:
        telemetry.request_id.reset(token)


async def _converse(service: Service, scope: Scope, receive: Receive, channel: Channel) -> None:
    try:
        caller = service.door.enter(scope)
        caller.tenant.call()
        session = Session(service, channel, caller, *_admit(service, scope))
        caller.tenant.open_socket()
    except MotetError as error:
        problem = Problem.of(error)
        await channel.send(channel.error(problem))
        code = next((code for kind, code in _CLOSE_CODES if isinstance(error, kind)), _BAD_REQUEST)
        await channel.close(code, problem.message)
        return
    service.sessions.add(session)
    try:
        await session.run(receive)
    finally:
        service.sessions.discard(session)
        caller.tenant.close_socket()


def _admit(service: Service, scope: Scope) -> tuple[str, Kind]:
    """The model to talk to, and what for. Raises what the client must be told."""
    query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    if unknown := sorted(query.keys() - {"model", "intent"}):
        raise UnsupportedParameter(f"unknown query parameter {unknown[0]!r}; remove it", param=unknown[0])
    if "intent" in query:
        return _admit_transcription(service, query["intent"][0])
    if not query.get("model", [""])[0]:
        raise BadRequest("`model` is required: /v1/realtime?model=…", param="model")
    _check_room(service)
    service.admit(query["model"][0])
    return query["model"][0], "realtime"


def _admit_transcription(service: Service, intent: str) -> tuple[str, Kind]:
    """A session that only listens needs no model to talk to; which one hears it is said in its settings."""
    if intent != "transcription":
        raise UnsupportedParameter(f"`intent` is {intent!r}; it takes 'transcription', or leave it out", param="intent")
    Speech.here(service.bus.directory).need("intent", ears=True)
    _check_room(service)
    service.check_open()
    return "", "transcription"


def _check_room(service: Service) -> None:
    if len(service.sessions) >= service.config.max_sockets:
        raise Overloaded(f"{len(service.sessions)} sockets are open, the most allowed here; try again in a moment")
