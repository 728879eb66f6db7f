"""Prepare the settings of a session before it has a connection."""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import UNSET

from motet_gateway.context import GatewayContext
from motet_pipelines.voice.conversation.history import new_id
from motet_pipelines.voice.services import SpeechServices

from .audio_settings import check_transcription, with_voice
from .events import SessionPatch
from .session_settings import Kind, SessionSettings

DEFAULT_MODEL = "gpt-realtime"  # stands for any chat model


@dataclass(frozen=True, slots=True)
class PreparedSession:
    """Settings of a session, and the id that it will have."""

    settings: SessionSettings
    session_id: str


async def prepare_session(
    service: GatewayContext, owner: str, patch: SessionPatch, model: str = ""
) -> PreparedSession:
    """Return a session with the fields of `patch`; its model is that of the patch, else `model`.

    `owner`: the tenant, whose own voices it may have.

    Raises MotetError for settings that it could not have, as `session.update` does.
    """
    kind: Kind = "realtime" if patch.type is UNSET else patch.type
    if kind == "transcription":
        service.check_open()
        served = ""
    else:
        given = model if patch.model is UNSET else patch.model
        served = service.admit(given or DEFAULT_MODEL)
    speech = SpeechServices.find(service.bus.directory, coming=True, model=served)
    before = SessionSettings.default(served, speech, kind)
    settings = before.updated(patch, speech)
    check_transcription(service.bus.directory, settings.audio, "session")
    audio = await with_voice(service, owner, settings.audio, before.audio, False, "session", served)
    return PreparedSession(replace(settings, audio=audio), new_id("sess"))
