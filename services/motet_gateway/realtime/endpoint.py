"""Accept connections to `/v1/realtime`.

The WebSocket upgrade always succeeds (`motet_gateway.http.socket`); errors are sent on the socket
before it closes.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qs

from motet_gateway.context import GatewayContext
from motet_gateway.http.asgi import Scope
from motet_gateway.http.socket import Socket
from motet_gateway.openai.aliases import CHAT, role_of_alias
from motet_gateway.tenancy.auth import Caller
from motet_gateway.tenancy.client_secrets import SECRET, ClientSecret
from motet_pipelines.voice.services import SpeechServices
from motet_shared.errors import BadRequest, UnsupportedParameter

from .client_secrets import prepared_by
from .event_log import EventNotFound
from .prepared_session import PreparedSession
from .session import Attachment, Session
from .session_settings import Kind

# Close codes of accidental closes, or of pages that are left and may come back.
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
            raise UnsupportedParameter(
                f"unknown query parameter {unknown[0]!r}; remove it", param=unknown[0]
            )
        query = cls(**{name: values[0] for name, values in given.items()})
        if query.after is not None and not query.session_id:
            raise BadRequest(
                "`after` goes with `session_id`: of which session is the event?", param="after"
            )
        return query


async def realtime(service: GatewayContext, socket: Socket) -> None:
    """Serve one connection, whose upgrade is complete, to its end.

    Raises MotetError with the message for the client if there is no session for it.
    """
    if socket.caller is None:
        raise RuntimeError("the connection is not authenticated yet: `caller` is not set")
    socket.be_original()
    query = _Query.of(socket.scope)
    begin = _resume if query.session_id else _open
    session, attachment = await begin(service, socket.caller, query, socket)
    socket.served = True
    code = None
    try:
        code = await session.run(socket.receive, attachment)
    finally:
        await _left(service, session, attachment, code)


async def _left(
    service: GatewayContext, session: Session, attachment: Attachment, code: int | None
) -> None:
    """Keep or end the session of a closed socket. `code`: its close code, None if it failed."""
    if attachment.taken_over:
        return
    sessions = service.sessions
    stays = (
        (attachment.released or code in _ACCIDENTS)
        and sessions.keeping
        and not service.limits.draining
        and not session.channel.closed
    )
    if stays:
        sessions.keep(session)
    else:
        await sessions.end(session)


# ------------------------------------------------------------------------------------ new session
async def _open(
    service: GatewayContext, caller: Caller, query: _Query, socket: Socket
) -> tuple[Session, Attachment]:
    """Open a new session. Raises MotetError with the message for the client."""
    if caller.secret is not None:
        session = await _prepared(service, caller, caller.secret, query, socket)
    else:
        model, kind = _admit(service, query, is_admitted=socket.is_adopted)
        session = Session(service, socket, caller, model, kind, kept=socket.keep())
        await service.sessions.add(session, is_admitted=socket.is_adopted)
    return session, session.attachment


async def _prepared(
    service: GatewayContext, caller: Caller, secret: ClientSecret, query: _Query, socket: Socket
) -> Session:
    """Open the session of a client secret, which that can do once."""
    is_admitted = socket.memo(SECRET) is not None  # else it was not opened before
    prepared = await admit_secret(service, secret, query.model, is_admitted=is_admitted)
    settings, secrets = prepared.settings, service.client_secrets
    stored = secrets.stored(secret)
    if is_admitted:
        secret.opened = True
    else:
        await secrets.open(secret)
    try:
        kept = socket.keep()
        if kept is not None and not is_admitted:
            kept.note(SECRET, stored, lasts=True)
        session = Session(
            service, socket, caller, settings.model, settings.kind, prepared, kept=kept
        )
        await service.sessions.add(session, is_admitted=is_admitted)
    except BaseException:
        await secrets.close(secret)
        raise
    return session


async def admit_secret(
    service: GatewayContext, secret: ClientSecret, given: str, *, is_admitted: bool = False
) -> PreparedSession:
    """Return the session that a secret opens.

    given: the model that the client names, if any. is_admitted: another gateway has opened it.

    Raises MotetError if it cannot be opened now.
    """
    if not is_admitted:
        secret.check_unused()
        service.check_room()
    prepared = await prepared_by(service, secret)
    model = prepared.settings.model
    if given not in ("", model) and role_of_alias(given) != CHAT:
        message = f"`model` is {given!r}, but the client secret is for {model!r}; leave it out"
        raise BadRequest(message, param="model")
    return prepared


def _admit(service: GatewayContext, query: _Query, *, is_admitted: bool) -> tuple[str, Kind]:
    """Return the model of the session ("" for transcription) and the kind of session.

    is_admitted: there was room for it in another gateway.
    """
    if not is_admitted:
        service.check_room()
    if query.intent is not None:
        return _admit_transcription(service, query.intent)
    if not query.model:
        raise BadRequest("`model` is required: /v1/realtime?model=…", param="model")
    return service.admit(query.model), "realtime"


def _admit_transcription(service: GatewayContext, intent: str) -> tuple[str, Kind]:
    """Admit a session that only transcribes; its settings name the recognizer, not its URL."""
    if intent != "transcription":
        raise UnsupportedParameter(
            f"`intent` is {intent!r}; it takes 'transcription', or leave it out", param="intent"
        )
    SpeechServices.find(service.bus.directory, coming=True).need("intent", transcription=True)
    service.check_open()
    return "", "transcription"


# -------------------------------------------------------------------------------- resumed session
async def _resume(
    service: GatewayContext, caller: Caller, query: _Query, socket: Socket
) -> tuple[Session, Attachment]:
    """Return the session that this client had before, attached to its new socket.

    Raises MotetError with the message for the client; the session is then unchanged. Raises
    ClientGone if another gateway is asked for it.
    """
    service.check_open()
    await service.sessions.arrived(query.session_id)
    if service.sessions.keeping and not service.sessions.has(query.session_id):
        socket.pass_on()
    session = service.sessions.find(query.session_id, caller)
    await session.heard()
    if session.player is not None:
        raise BadRequest(
            "the session is a call, which ends with its connection", param="session_id"
        )
    if query.model not in ("", session.settings.model) and role_of_alias(query.model) != CHAT:
        message = f"`model` is {query.model!r}, but the session talks to {session.settings.model!r}; leave it out"
        raise BadRequest(message, param="model")
    session.channel.check(query.after)
    async with session.moving:
        if service.sessions.is_kept(session):
            service.check_room()
        await session.release()
        service.sessions.find(query.session_id, caller)  # it may have ended in the meantime
        try:
            attachment = session.attach(socket, query.after)
        except EventNotFound:
            if not service.sessions.is_kept(session):
                service.sessions.keep(session)
            raise
        service.sessions.reclaim(session)
        return session, attachment
