"""Define what a caller gives to a conversation: audio, items, and requests for replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .conversation_state import ConversationState
from .frames import Frame
from .history import Item
from .settings import ConversationSettings, ReplySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """Base of all inputs. `tag`: given back in the event that reports a refusal."""

    tag: str | None = None


@dataclass(frozen=True, slots=True)
class GivenItem:
    """Item of the caller.

    audio: PCM of its spoken parts without a transcript, by part, at `rate` Hz.
    """

    item: Item
    audio: dict[int, bytes] = field(default_factory=dict)
    rate: int = 0


@dataclass(frozen=True, slots=True)
class Configure(Input):
    """Replace the settings. A change of the rate empties the audio buffer."""

    settings: ConversationSettings


@dataclass(frozen=True, slots=True)
class AddFrames(Input):
    """Add frames of the user's camera, oldest first.

    item: the caller's item that they came in, which is reported as added and not kept.
    """

    frames: tuple[Frame, ...]
    item: Item | None = None


@dataclass(frozen=True, slots=True)
class AppendAudio(Input):
    """Append PCM to the audio buffer."""

    pcm: bytes


@dataclass(frozen=True, slots=True)
class CommitAudio(Input):
    """Make the audio buffer an item, without a request for a reply."""


@dataclass(frozen=True, slots=True)
class ClearAudio(Input):
    """Empty the audio buffer."""


@dataclass(frozen=True, slots=True)
class AddItem(Input):
    """Insert an item behind the item `after` ("root": first; None: last)."""

    given: GivenItem
    after: str | None = None


@dataclass(frozen=True, slots=True)
class RetrieveItem(Input):
    item_id: str


@dataclass(frozen=True, slots=True)
class DeleteItem(Input):
    item_id: str


@dataclass(frozen=True, slots=True)
class TruncateItem(Input):
    """Cut a spoken reply to its first `audio_ms`: what the user heard of it."""

    item_id: str
    audio_ms: int


@dataclass(frozen=True, slots=True)
class CreateReply(Input):
    """Create a reply.

    settings: None: those of the conversation.
    context: items, or ids of items of the conversation; None: the whole conversation.
    in_conversation: the reply becomes a part of the conversation.
    metadata: opaque; the caller finds it in the events of the reply.
    """

    settings: ReplySettings | None = None
    context: tuple[GivenItem | str, ...] | None = None
    in_conversation: bool = True
    metadata: Any = None


@dataclass(frozen=True, slots=True)
class CancelReply(Input):
    """Cancel a reply. `reply_id`: None for the one that writes the conversation."""

    reply_id: str | None = None


@dataclass(frozen=True, slots=True)
class Save(Input):
    """Call `save` with the state of the conversation if nothing runs for it."""

    save: Callable[[ConversationState], object]


@dataclass(frozen=True, slots=True)
class Drain(Input):
    """Answer no more turns; `Drained` follows when the running replies have ended."""
