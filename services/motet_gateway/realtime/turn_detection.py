"""`turn_detection`: who tells when the user's turn begins and ends, and what interrupts a reply.

`interrupt_on` and `interrupt_after_ms` are extensions.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from motet_pipelines.turns import Manners

from ..fields import Ratio
from .setting import Setting

Milliseconds = Annotated[int, Meta(ge=0, le=60_000)]
Eagerness = Literal["low", "medium", "high", "auto"]


class Detection(Setting, frozen=True):
    """What both kinds have.

    interrupt_on: "words": a cough or "mhm" does not end a reply; "speech": any speech does, as soon as it starts.
    interrupt_after_ms: how much speech counts as words where no recognizer hears live.
    """

    create_response: bool = True
    interrupt_response: bool = True
    interrupt_on: Literal["words", "speech"] = "words"
    interrupt_after_ms: Milliseconds = 500

    @property
    def by_words(self) -> bool:
        return self.interrupt_response and self.interrupt_on == "words"


class ServerVad(Detection, frozen=True, tag="server_vad"):
    """Silence ends a turn."""

    threshold: Ratio = 0.5
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=3000)] = 300
    silence_duration_ms: Milliseconds = 500
    idle_timeout_ms: Annotated[int, Meta(ge=500, le=60_000)] | None = None

    def manners(self) -> Manners:
        return Manners(
            threshold=self.threshold,
            padding=self.prefix_padding_ms,
            silence=self.silence_duration_ms,
            words=self.by_words,
            interrupt=self.interrupt_after_ms,
        )


class SemanticVad(Detection, frozen=True, tag="semantic_vad"):
    """The words decide how long a silence has to be."""

    eagerness: Eagerness = "auto"

    @property
    def idle_timeout_ms(self) -> None:
        """Only `server_vad` has one."""

    def manners(self) -> Manners:
        return Manners(eagerness=self.eagerness, words=self.by_words, interrupt=self.interrupt_after_ms)


TurnDetection = ServerVad | SemanticVad
