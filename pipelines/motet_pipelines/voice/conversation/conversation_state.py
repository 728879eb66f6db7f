"""Define the state of a conversation at a time when nothing runs for it.

Each part brings its own: another process makes the same objects from it, and goes on.
"""

from __future__ import annotations

import msgspec

from motet_pipelines.answers import WireError
from motet_pipelines.voice.audio_buffer import AudioState

from .floor import FloorState
from .frames import FramesState
from .history import HistoryState
from .spoken_words import SpokenState


class RepliesState(msgspec.Struct, frozen=True):
    """Replies begun, and the last epoch; whether a turn is unanswered; spoken items by id."""

    begun: int
    epoch: int
    unanswered: bool
    spoken: dict[str, SpokenState]


class InputState(msgspec.Struct, frozen=True):
    """Items that were begun, the audio with what is not committed of it, and whether turns are detected.

    begin: ms of audio before it is committed or cleared.
    """

    items: int
    begin: float
    audio: AudioState
    detects: bool


class ConversationState(msgspec.Struct, frozen=True):
    """The state of a conversation; failed: transcripts, by part of an item."""

    history: HistoryState
    frames: FramesState
    floor: FloorState
    replies: RepliesState
    audio: InputState
    failed: dict[str, WireError]
