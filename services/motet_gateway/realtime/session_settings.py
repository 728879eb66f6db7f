"""Define the settings of a session, and what a client may change in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from motet_gateway.openai.aliases import CHAT, role_of_alias
from motet_gateway.openai.structured import AUTO_TOOL_CHOICE, ToolChoice, tool_choice_of
from motet_pipelines.voice.conversation.settings import (
    ConversationSettings,
    ReplySettings,
    Retention,
)
from motet_pipelines.voice.services import SpeechServices
from motet_pipelines.voice.speak import ClonedVoice
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest, UnsupportedParameter

from .audio_settings import NO_SETTINGS, AudioPatch, AudioSettings, InputTranscription
from .events import (
    Common,
    Include,
    RealtimeTool,
    ResponsePatch,
    RetentionRatio,
    SessionPatch,
    TokenLimits,
    Truncation,
)
from .formats import input_rate
from .settings_base import wire
from .turn_detection import ServerVad
from .video.settings import Video

Kind = Literal["realtime", "transcription"]

# Values at which a setting has no effect; any other is refused by name.
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (None, True),
    "prompt": (None,),
    "reasoning": (None,),
    "tracing": (None,),
}
_UNMENTIONED = ("instructions", "tools", "temperature")  # null means the same as an absent field
_INHERITED = ("instructions", "tools", "tool_choice", "max_output_tokens", "temperature")


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Settings of a session, or of one of its responses."""

    model: str
    instructions: str = ""
    tools: tuple[RealtimeTool, ...] = ()
    tool_choice: ToolChoice = AUTO_TOOL_CHOICE
    max_output_tokens: int | Literal["inf"] = "inf"
    temperature: float = 0.8
    truncation: Truncation = "auto"
    include: tuple[Include, ...] = ()
    kind: Kind = "realtime"
    speaks: bool = False
    audio: AudioSettings = NO_SETTINGS
    video: Video | None = None
    target: str = ""  # of the model's chain, by the header `motet-target`

    @classmethod
    def default(cls, model: str, speech: SpeechServices, kind: Kind) -> SessionSettings:
        """Return the settings of a new session: speech is on if this server has the services for it."""
        turns = ServerVad() if speech.listens and speech.turn_detection else None
        if kind == "transcription":
            return cls(
                model,
                kind=kind,
                audio=AudioSettings(turn_detection=turns, transcription=InputTranscription()),
            )
        audio = AudioSettings(turn_detection=turns, itself=speech.itself)
        return cls(model, speaks=bool(speech.speech), audio=audio)

    def updated(self, patch: SessionPatch, speech: SpeechServices) -> SessionSettings:
        """Return the settings with the fields of `patch` that are present.

        Raises BadRequest or UnsupportedParameter if one of them is refused; then none is applied.
        """
        if patch.type == "transcription":
            speech.need("session.type", transcription=True)
        if patch.model not in (UNSET, self.model) and role_of_alias(str(patch.model)) != CHAT:
            message = f"`session.model` cannot change from {self.model!r}; open another connection"
            raise BadRequest(message, param="session.model")
        changed = self._with(patch, "session", speech)
        if patch.type is not UNSET:
            changed = replace(changed, kind=patch.type)
        if changed.kind == "realtime" and not changed.model:
            raise BadRequest(
                "a session without a model only transcribes; connect with ?model=…",
                param="session.type",
            )
        if changed.kind == "transcription" and changed.audio.model_input is not None:
            raise UnsupportedParameter(
                "`session.audio.input.model_input` is for sessions with a model; omit it",
                param="session.audio.input.model_input",
            )
        if changed.kind == "transcription" and changed.audio.transcription is None:
            changed = replace(
                changed, audio=replace(changed.audio, transcription=InputTranscription())
            )
        if patch.include is not UNSET:
            changed = replace(changed, include=tuple(patch.include or ()))
        if patch.video is not UNSET:
            changed = replace(changed, video=patch.video)
        if patch.truncation is UNSET:
            return changed
        return replace(changed, truncation=patch.truncation or "auto")

    def for_response(self, patch: ResponsePatch, speech: SpeechServices) -> SessionSettings:
        """Return the settings with the overrides of one response."""
        if isinstance(patch.audio, AudioPatch) and patch.audio.input not in (UNSET, None):
            raise UnsupportedParameter(
                "`response.audio.input` is not the response's; set it in the session"
            )
        return self._with(patch, "response", speech)

    def _with(self, patch: Common, where: str, speech: SpeechServices) -> SessionSettings:
        _refuse_unsupported(patch, where)
        speaks = self.speaks
        if isinstance(patch.output_modalities, list):
            speaks = _speaks(patch.output_modalities, f"{where}.output_modalities", speech)
        audio = self.audio
        if isinstance(patch.audio, AudioPatch):
            audio = audio.updated(patch.audio, f"{where}.audio", speech)
        given = {name: getattr(patch, name) for name in _INHERITED}
        changes: dict[str, Any] = {
            name: value
            for name, value in given.items()
            if value is not UNSET and not (value is None and name in _UNMENTIONED)
        }
        if "tools" in changes:
            changes["tools"] = tuple(changes["tools"])
        if "tool_choice" in changes:
            changes["tool_choice"] = tool_choice_of(changes["tool_choice"], f"{where}.tool_choice")
        if "max_output_tokens" in changes:
            changes["max_output_tokens"] = changes["max_output_tokens"] or "inf"
        return replace(self, speaks=speaks, audio=audio, **changes)

    @property
    def modalities(self) -> list[str]:
        return ["audio"] if self.speaks else ["text"]

    def wire_tools(self) -> list[dict[str, Any]]:
        """Return the tools in the shape of chat requests."""
        return [
            {
                "type": "function",
                "function": {k: v for k, v in msgspec.to_builtins(tool).items() if k != "type"},
            }
            for tool in self.tools
        ]

    def as_conversation(self) -> ConversationSettings:
        """Return the settings of the conversation behind the session."""
        transcription, detection = self.audio.transcription, self.audio.turn_detection
        shown = None if transcription is None else transcription.settings
        if shown is not None and self.include:
            shown = replace(shown, logprobs=True)
        return ConversationSettings(
            rate=input_rate(self.audio.input_format),
            transcription=shown,
            turns=None if detection is None else detection.turns,
            reply=self.as_reply() if self.kind == "realtime" else None,
            video=None if self.video is None else self.video.settings,
        )

    def as_reply(self) -> ReplySettings:
        """Return the settings of a reply, labelled with these."""
        choice = self.tool_choice
        limit = self.max_output_tokens
        return ReplySettings(
            model=self.model,
            target=self.target,
            hears=self.audio.hears,
            instructions=self.instructions,
            tools=tuple(self.wire_tools()),
            tool_choice=choice.kind if self.tools or choice.kind == "required" else "none",
            tool=choice.tool,
            max_tokens=None if limit == "inf" else limit,
            temperature=self.temperature,
            shorten=self.truncation != "disabled",
            retention=self._retention(),
            speaks=self.speaks,
            voice="" if self.audio.cloned else self.audio.voice or "",
            cloned=self.audio.cloned,
            speed=self.audio.speed,
            label=self,
        )

    def _retention(self) -> Retention | None:
        if not isinstance(self.truncation, RetentionRatio):
            return None
        limits = self.truncation.token_limits or TokenLimits()
        return Retention(
            ratio=self.truncation.retention_ratio, tokens=limits.post_instructions or 0
        )

    def as_session(self, session_id: str) -> dict[str, Any]:
        """Return the session object of `session.created` and `session.updated`."""
        if self.kind == "transcription":
            audio = {"input": self.audio.as_session()["input"]}
            return {
                "type": self.kind,
                "object": "realtime.transcription_session",
                "id": session_id,
                "include": list(self.include) or None,
                "audio": audio,
            }
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": session_id,
            "model": self.model,
            "output_modalities": self.modalities,
            "instructions": self.instructions,
            "tools": [{"type": "function", **msgspec.to_builtins(tool)} for tool in self.tools],
            "tool_choice": self.tool_choice.as_realtime(),
            "parallel_tool_calls": True,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "truncation": msgspec.to_builtins(self.truncation),
            "tracing": None,
            "prompt": None,
            "include": list(self.include) or None,
            "audio": self.audio.as_session(),
            **({} if self.video is None else {"video": wire(self.video)}),
        }


class SettingsState(msgspec.Struct, frozen=True):
    """Settings without the recording of their voice; that, its PCM and its words, if there is one."""

    settings: SessionSettings
    recording: tuple[bytes, str] | None

    @classmethod
    def of(cls, settings: SessionSettings) -> SettingsState:
        cloned = settings.audio.cloned
        if cloned is None:
            return cls(settings, None)
        plain = replace(settings, audio=replace(settings.audio, cloned=None))
        return cls(plain, (cloned.pcm, cloned.words))

    def restored(self, store: BlobStore) -> SessionSettings:
        """Return the settings, of which `store` lends the recording."""
        if self.recording is None:
            return self.settings
        cloned = ClonedVoice(store, *self.recording)
        return replace(self.settings, audio=replace(self.settings.audio, cloned=cloned))


def _speaks(modalities: list[Literal["text", "audio"]], param: str, speech: SpeechServices) -> bool:
    if modalities not in (["text"], ["audio"]):
        raise BadRequest(
            f"`{param}` is {modalities}; it takes ['audio'], which has a transcript, or ['text']",
            param=param,
        )
    if modalities == ["audio"]:
        speech.need(param, speech=True)
    return modalities == ["audio"]


def _refuse_unsupported(patch: Common, where: str) -> None:
    for name, accepted in _NO_EFFECT.items():
        value = getattr(patch, name, UNSET)
        if value is not UNSET and value not in accepted:
            message = f"`{where}.{name}` is not supported; omit it"
            raise UnsupportedParameter(message, param=f"{where}.{name}")
