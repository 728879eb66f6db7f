"""The door of `/v1/realtime`: the upgrade succeeds, and what is wrong is said on the socket."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qs

from motet_shared import telemetry
from motet_shared.errors import BadRequest, Draining, MotetError, Overloaded, Unavailable, UnsupportedParameter

from ..asgi import ClientGone, Receive, Scope, Send, request_id
from ..auth import Caller
from ..problems import Forbidden, Problem, Unauthorized
from ..service import Service
from .audio_settings import Speech
from .channel import Channel
from .event_log import EventNotFound
from .session import Attachment, Session
from .settings import Kind
from .socket import Socket

_CLOSE_CODES: tuple[tuple[type[MotetError], int], ...] = (
    (Unauthorized, 3000),
    (Forbidden, 3000),
    (Draining, 1012),
    (Overloaded, 1013),
    (Unavailable, 1013),
)
_BAD_REQUEST = 4000
# What a socket closes with that its client did not mean to close, or whose page goes away and may be back.
_ACCIDENTS = (1001, 1006, 1011, 1012, 1013, 1014, 1015)


@dataclass(frozen=True, slots=True)
class _Query:
    model: str = ""
    intent: str | None = None
    session_id: str = ""
    after: str | None = None

    @classmethod
    def of(cls, scope: Scope) -> _Query:
        given = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if unknown := sorted(given.keys() - set(cls.__slots__)):
            raise UnsupportedParameter(f"unknown query parameter {unknown[0]!r}; remove it", param=unknown[0])
        query = cls(**{name: values[0] for name, values in given.items()})
        if query.after is not None and not query.session_id:
            raise BadRequest("`after` goes with `session_id`: of which session is the event?", param="after")
        return query


async def realtime(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """One connection, from its upgrade to its end."""
    name = request_id(scope)
    token = telemetry.request_id.set(name)
    await receive()
    subprotocol = "realtime" if "realtime" in scope.get("subprotocols", ()) else None
    socket = Socket(scope, send)
    try:
        await socket.accept(subprotocol, [(b"x-request-id", name.encode())])
        await _converse(service, scope, receive, socket)
    except ClientGone:
        pass  # nobody is left to tell
    finally:
        telemetry.request_id.reset(token)


async def _converse(service: Service, scope: Scope, receive: Receive, socket: Socket) -> None:
    try:
        caller = service.door.enter(scope)
        caller.tenant.call()
        query = _Query.of(scope)
        begin = _resume if query.session_id else _open
        session, attachment = await begin(service, caller, query, socket)
    except MotetError as error:
        await _refuse(service, socket, error)
        return
    code = None
    try:
        code = await session.run(receive, attachment)
    finally:
        await _left(service, session, attachment, code)


async def _refuse(service: Service, socket: Socket, error: MotetError) -> None:
    problem = Problem.of(error)
    channel = Channel(socket, service.config.session_memory)
    await channel.send(channel.error(problem))
    code = next((code for kind, code in _CLOSE_CODES if isinstance(error, kind)), _BAD_REQUEST)
    await channel.close(code, problem.message)


async def _left(service: Service, session: Session, attachment: Attachment, code: int | None) -> None:
    """What becomes of a session whose socket is gone. `code`: None if it did not end by closing."""
    if attachment.taken_over:
        return
    sessions = service.sessions
    stays = code in _ACCIDENTS and sessions.keeping and not service.limits.draining and not session.channel.closed
    if stays:
        sessions.keep(session)
    else:
        await sessions.end(session)


# ---------------------------------------------------------------------------------------------------------- a new one
async def _open(service: Service, caller: Caller, query: _Query, socket: Socket) -> tuple[Session, Attachment]:
    """A new session. Raises what the client must be told."""
    session = Session(service, socket, caller, *_admit(service, query))
    service.sessions.add(session)
    return session, session.attachment


def _admit(service: Service, query: _Query) -> tuple[str, Kind]:
    """The model to talk to, and what for."""
    if query.intent is not None:
        return _admit_transcription(service, query.intent)
    if not query.model:
        raise BadRequest("`model` is required: /v1/realtime?model=…", param="model")
    _check_room(service)
    service.admit(query.model)
    return query.model, "realtime"


def _admit_transcription(service: Service, intent: str) -> tuple[str, Kind]:
    """A session that only listens needs no model to talk to; which one hears it is said in its settings."""
    if intent != "transcription":
        raise UnsupportedParameter(f"`intent` is {intent!r}; it takes 'transcription', or leave it out", param="intent")
    Speech.here(service.bus.directory).need("intent", ears=True)
    _check_room(service)
    service.check_open()
    return "", "transcription"


def _check_room(service: Service) -> None:
    connected = service.sessions.connected
    if connected >= service.config.max_sockets:
        raise Overloaded(f"{connected} sockets are open, the most allowed here; try again in a moment")


# ------------------------------------------------------------------------------------------------- one that goes on
async def _resume(service: Service, caller: Caller, query: _Query, socket: Socket) -> tuple[Session, Attachment]:
    """The session that this client had. Raises what it must be told; then the session is as it was."""
    service.check_open()
    session = service.sessions.find(query.session_id, caller)
    if query.model and query.model != session.settings.model:
        message = f"`model` is {query.model!r}, but the session talks to {session.settings.model!r}; leave it out"
        raise BadRequest(message, param="model")
    session.channel.check(query.after)
    async with session.moving:
        if service.sessions.is_kept(session):
            _check_room(service)
        await session.release()
        service.sessions.find(query.session_id, caller)  # it may have ended meanwhile
        try:
            attachment = session.attach(socket, query.after)
        except EventNotFound:
            if not service.sessions.is_kept(session):
                service.sessions.keep(session)
            raise
        service.sessions.reclaim(session)
        return session, attachment
