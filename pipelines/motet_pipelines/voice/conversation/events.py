"""Define the events of a conversation. Times are in ms of the user's audio."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from msgspec import Struct, field

from motet_pipelines.voice.voice import TokenScores
from motet_shared.messages import Usage

from .history import Item
from .settings import ReplySettings

Status = Literal["completed", "incomplete", "cancelled", "failed"]

OutputKind = Literal["text", "speech", "function_call"]


class Event(Struct, frozen=True):
    """Base of all events."""


# --------------------------------------------------------------------------------------------- user
class SpeechStarted(Event, frozen=True):
    """The user began a turn at `ms`, which will be the item `item_id`."""

    item_id: str
    ms: int


class SpeechStopped(Event, frozen=True):
    item_id: str
    ms: int


class IdleTimeout(Event, frozen=True):
    """The user was silent for the idle timeout; an empty item asks for a reply."""

    item_id: str
    start_ms: int
    end_ms: int


class AudioCommitted(Event, frozen=True):
    """The user's audio became an item. `previous`: id of the item before it."""

    item: Item
    previous: str | None


class AudioCleared(Event, frozen=True):
    pass


class TranscriptDelta(Event, frozen=True):
    """The transcript of a spoken part continues with `text`."""

    item_id: str
    part: int
    text: str
    scores: TokenScores | None = None  # if log-probabilities are reported


class TranscriptCompleted(Event, frozen=True):
    """The transcript of a spoken part of `seconds` is final; the deltas add up to it."""

    item_id: str
    part: int
    text: str
    seconds: float
    scores: TokenScores | None = None


class TranscriptFailed(Event, frozen=True):
    item_id: str
    part: int
    error: Exception


# -------------------------------------------------------------------------------------------- items
class ItemAdded(Event, frozen=True):
    item: Item
    previous: str | None


class ItemRetrieved(Event, frozen=True):
    item: Item


class ItemDeleted(Event, frozen=True):
    item_id: str


class ItemTruncated(Event, frozen=True):
    item_id: str
    audio_ms: int


# ------------------------------------------------------------------------------------------ replies
class ReplyStarted(Event, frozen=True):
    reply_id: str
    settings: ReplySettings
    in_conversation: bool
    metadata: Any


class OutputOpened(Event, frozen=True):
    """Report that a message or function call of a reply begins: output number `index`, still empty."""

    reply_id: str
    index: int
    kind: OutputKind
    item: Item
    previous: str | None


class TextDelta(Event, frozen=True):
    reply_id: str
    index: int
    text: str


class SpeechDelta(Event, frozen=True):
    """Deliver PCM at 24 kHz of a spoken message and the words it completes; either may be empty."""

    reply_id: str
    index: int
    pcm: bytes
    words: str


class ArgumentsDelta(Event, frozen=True):
    """The arguments of a function call continue with `text`."""

    reply_id: str
    index: int
    text: str


class OutputClosed(Event, frozen=True):
    reply_id: str
    index: int
    item: Item
    previous: str | None


class ReplyEnded(Event, frozen=True, kw_only=True):
    """A reply ended.

    reason: `turn_detected` (barge-in) or `client_cancelled`; `max_output_tokens` if incomplete.
    error: set if the status is "failed".
    usage: tokens of the text; None if the reply has not ended by itself.
    """

    reply_id: str
    status: Status
    reason: str = ""
    error: Exception | None = None
    items: list[Item] = field(default_factory=list)
    usage: Usage | None = None
    speech_usage: Usage = field(default_factory=Usage)


# ------------------------------------------------------------------------------------- conversation
class Configured(Event, frozen=True):
    """The settings of a `Configure` apply."""


class Failed(Event, frozen=True):
    """An input was refused (`tag` is its), or turn detection or an answer failed (`tag` is None)."""

    error: Exception
    tag: str | None = None


class Drained(Event, frozen=True):
    """After `Drain`: all replies have ended."""


class EventSink(Protocol):
    """Describe what takes the events of a conversation, in their order."""

    @property
    def is_free(self) -> bool:
        """Return True if what is posted now is sent at once: nothing waits for the caller to read."""

    def post(self, *events: Event) -> None:
        """Take a batch of events without waiting: none comes between them."""

    async def emit(self, *events: Event) -> None:
        """Take a batch, and return once more may come: a slow caller slows down what it receives.

        The batch is taken before the first wait; a cancelled call takes all of it or nothing.
        """
