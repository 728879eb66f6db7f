"""Define the settings of a conversation, which its caller may replace while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from motet_pipelines.voice.speak import RATE, ClonedVoice
from motet_pipelines.voice.turns import TurnPolicy

_POLICY = TurnPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionSettings:
    """Settings of the transcription of user audio.

    model: empty for the first one served. logprobs: report those of the tokens. Live captions have
    none, so that the audio is then transcribed again once it is committed.
    """

    model: str = ""
    language: str = ""
    prompt: str = ""
    logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSettings:
    """Settings of turn detection, and what follows from a turn."""

    policy: TurnPolicy = _POLICY
    reply: bool = True  # a turn that ends is answered
    barge_in: bool = True  # a turn that begins cancels the reply
    idle_timeout_ms: int | None = None  # silence after which a reply is created


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Limit of a conversation, after its instructions.

    ratio: share of the limit that is kept when it is exceeded. tokens: the limit; 0: what the
    model's context leaves.
    """

    ratio: float
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSettings:
    """Settings of which frames of a camera are retained; `frames` has the policies.

    frames: pictures of a prompt that are one frame each. groups, group_size: of `merged`.
    """

    kind: Literal["window", "stride", "merged"] = "window"
    frames: int
    groups: int = 0
    group_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySettings:
    """Settings of a reply.

    target: the only target of the model's chain that may serve it; empty: any.
    cloned: a recording whose voice is used instead of `voice`.
    hears: a model that accepts sound gets that of the user, which is then transcribed only if the
    conversation reports transcripts; other models get a transcript.
    """

    model: str
    target: str = ""
    hears: bool = False
    instructions: str = ""
    tools: tuple[dict[str, Any], ...] = ()  # in the form of chat requests
    tool_choice: Literal["none", "auto", "required"] = "auto"
    tool: str = ""  # name of the only tool that may be called
    max_tokens: int | None = None
    temperature: float = 0.8
    shorten: bool = True  # drop the oldest turns where the context is too long
    retention: Retention | None = None  # drop them earlier, and several at a time
    speaks: bool = True
    voice: str = ""
    cloned: ClonedVoice | None = None
    speed: float = 1.0
    label: Any = None  # opaque; the caller finds it in the events of the reply


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSettings:
    """Settings of a conversation.

    transcription: None: transcripts of user audio are not reported; replies that need them have
    it transcribed.
    turns: None: the caller commits audio and creates replies.
    reply: None: the conversation is only transcribed.
    video: None: frames of a camera are refused.
    """

    rate: int = RATE  # Hz of the user's audio
    transcription: TranscriptionSettings | None = None
    turns: TurnSettings | None = None
    reply: ReplySettings | None = None
    video: VideoSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLimits:
    """Bounds of a conversation: memory in bytes, times in seconds."""

    max_bytes: int = 64 << 20  # of all items together, and of the audio buffer
    request_timeout: float | None = None  # of a reply, and of a transcription
    patience: float = 5.0  # without progress, before the last retryable error is raised
