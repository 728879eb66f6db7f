"""Define what a user chooses for a conversation, and convert it to the settings of one."""

from __future__ import annotations

from dataclasses import dataclass

from motet_pipelines.voice.conversation.inputs import AppendAudio, TruncateItem
from motet_pipelines.voice.conversation.settings import (
    ConversationSettings,
    ReplySettings,
    TranscriptionSettings,
    TurnSettings,
)

TalkInput = AppendAudio | TruncateItem


@dataclass(frozen=True, kw_only=True)
class Options:
    """Choices of the command line; "" stands for the server's own choice.

    transcribes, hears: whether a recognizer transcribes the user, and the model gets the sound.
    """

    model: str = ""
    system: str = ""
    voice: str = ""
    language: str = ""
    temperature: float = 0.8
    transcribes: bool = True
    hears: bool = False

    def settings(self, model: str) -> ConversationSettings:
        """Return the settings of a conversation with `model`."""
        return ConversationSettings(
            transcription=(
                TranscriptionSettings(language=self.language) if self.transcribes else None
            ),
            turns=TurnSettings(),
            reply=ReplySettings(
                model=model,
                hears=self.hears,
                instructions=self.system,
                voice=self.voice,
                temperature=self.temperature,
            ),
        )
