"""Define the state of a session at a time when nothing runs for it: a checkpoint (docs/front.md)."""

from __future__ import annotations

import msgspec

from motet_pipelines.voice.conversation.conversation_state import ConversationState

from .channel import ChannelState
from .server_events import ServerEventsState
from .session_settings import SettingsState


class SessionState(msgspec.Struct, frozen=True):
    """The state of a session.

    received: events of the client that were handled or refused. received_ms: of audio. asked: times
    that something was to be admitted.
    """

    id: str
    settings: SettingsState
    received: int
    received_ms: float
    asked: int
    channel: ChannelState
    rendering: ServerEventsState
    conversation: ConversationState


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(SessionState).decode
