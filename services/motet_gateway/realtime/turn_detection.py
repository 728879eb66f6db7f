"""Define `turn_detection`: how the user's turns are detected, and which speech is a barge-in.

`interrupt_on` and `interrupt_after_ms` are extensions of OpenAI's API.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from motet_gateway.http.fields import Ratio
from motet_pipelines.voice.conversation.settings import TurnSettings
from motet_pipelines.voice.turns import TurnPolicy

from .settings_base import StrictSettings

Milliseconds = Annotated[int, Meta(ge=0, le=60_000)]
Eagerness = Literal["low", "medium", "high", "auto"]


class Detection(StrictSettings, frozen=True):
    """Common settings of both kinds of turn detection.

    interrupt_on: "words": a cough or "mhm" does not end a reply; "speech": any speech does, as
        soon as it starts.
    interrupt_after_ms: ms of speech that count as words where no recognizer transcribes live.
    """

    create_response: bool = True
    interrupt_response: bool = True
    interrupt_on: Literal["words", "speech"] = "words"
    interrupt_after_ms: Milliseconds = 500

    @property
    def policy(self) -> TurnPolicy:
        """Return the policy of when a turn begins and ends."""
        raise NotImplementedError

    @property
    def turns(self) -> TurnSettings:
        return TurnSettings(
            policy=self.policy,
            reply=self.create_response,
            barge_in=self.interrupt_response,
            idle_timeout_ms=getattr(self, "idle_timeout_ms", None),
        )

    @property
    def by_words(self) -> bool:
        return self.interrupt_response and self.interrupt_on == "words"


class ServerVad(Detection, frozen=True, tag="server_vad"):
    """End a turn after a fixed silence."""

    threshold: Ratio = 0.5
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=3000)] = 300
    silence_duration_ms: Milliseconds = 500
    idle_timeout_ms: Annotated[int, Meta(ge=500, le=60_000)] | None = None

    @property
    def policy(self) -> TurnPolicy:
        return TurnPolicy(
            threshold=self.threshold,
            padding=self.prefix_padding_ms,
            silence=self.silence_duration_ms,
            words=self.by_words,
            interrupt=self.interrupt_after_ms,
        )


class SemanticVad(Detection, frozen=True, tag="semantic_vad"):
    """End a turn after a silence whose length depends on the words."""

    eagerness: Eagerness = "auto"

    @property
    def policy(self) -> TurnPolicy:
        return TurnPolicy(
            eagerness=self.eagerness, words=self.by_words, interrupt=self.interrupt_after_ms
        )


TurnDetection = ServerVad | SemanticVad
