"""Define the events of a conversation. Times are in ms of the user's audio."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from motet_pipelines.voice.voice import TokenScores
from motet_shared.messages import Usage

from .history import Item
from .settings import ReplySettings

Status = Literal["completed", "incomplete", "cancelled", "failed"]

OutputKind = Literal["text", "speech", "function_call"]


class Event:
    """Base of all events."""

    __slots__ = ()


# --------------------------------------------------------------------------------------------- user
@dataclass(frozen=True, slots=True)
class SpeechStarted(Event):
    """The user began a turn at `ms`, which will be the item `item_id`."""

    item_id: str
    ms: int


@dataclass(frozen=True, slots=True)
class SpeechStopped(Event):
    item_id: str
    ms: int


@dataclass(frozen=True, slots=True)
class IdleTimeout(Event):
    """The user was silent for the idle timeout; an empty item asks for a reply."""

    item_id: str
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class AudioCommitted(Event):
    """The user's audio became an item. `previous`: id of the item before it."""

    item: Item
    previous: str | None


@dataclass(frozen=True, slots=True)
class AudioCleared(Event):
    pass


@dataclass(frozen=True, slots=True)
class TranscriptDelta(Event):
    """The transcript of a spoken part continues with `text`."""

    item_id: str
    part: int
    text: str
    scores: TokenScores | None = None  # if log-probabilities are reported


@dataclass(frozen=True, slots=True)
class TranscriptCompleted(Event):
    """The transcript of a spoken part of `seconds` is final; the deltas add up to it."""

    item_id: str
    part: int
    text: str
    seconds: float
    scores: TokenScores | None = None


@dataclass(frozen=True, slots=True)
class TranscriptFailed(Event):
    item_id: str
    part: int
    error: Exception


# -------------------------------------------------------------------------------------------- items
@dataclass(frozen=True, slots=True)
class ItemAdded(Event):
    item: Item
    previous: str | None


@dataclass(frozen=True, slots=True)
class ItemRetrieved(Event):
    item: Item


@dataclass(frozen=True, slots=True)
class ItemDeleted(Event):
    item_id: str


@dataclass(frozen=True, slots=True)
class ItemTruncated(Event):
    item_id: str
    audio_ms: int


# ------------------------------------------------------------------------------------------ replies
@dataclass(frozen=True, slots=True)
class ReplyStarted(Event):
    reply_id: str
    settings: ReplySettings
    in_conversation: bool
    metadata: Any


@dataclass(frozen=True, slots=True)
class OutputOpened(Event):
    """Report that a message or function call of a reply begins: output number `index`, still empty."""

    reply_id: str
    index: int
    kind: OutputKind
    item: Item
    previous: str | None


@dataclass(frozen=True, slots=True)
class TextDelta(Event):
    reply_id: str
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class SpeechDelta(Event):
    """Deliver PCM at 24 kHz of a spoken message and the words it completes; either may be empty."""

    reply_id: str
    index: int
    pcm: bytes
    words: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta(Event):
    """The arguments of a function call continue with `text`."""

    reply_id: str
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class OutputClosed(Event):
    reply_id: str
    index: int
    item: Item
    previous: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyEnded(Event):
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
@dataclass(frozen=True, slots=True)
class Configured(Event):
    """The settings of a `Configure` apply."""


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """An input was refused (`tag` is its), or turn detection or an answer failed (`tag` is None)."""

    error: Exception
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class Drained(Event):
    """After `Drain`: all replies have ended."""


class EventSink(Protocol):
    """Describe what takes the events of a conversation, in their order."""

    def post(self, *events: Event) -> None:
        """Take a batch of events without waiting: none comes between them."""

    async def emit(self, *events: Event) -> None:
        """Take a batch, and return once more may come: a slow caller slows down what it receives.

        The batch is taken before the first wait; a cancelled call takes all of it or nothing.
        """
