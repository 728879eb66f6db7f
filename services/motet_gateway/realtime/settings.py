"""The settings of a session, and what a client may change in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from motet_shared.errors import BadRequest, UnsupportedParameter

from ..schema import check_tool_choice
from .events import SPEECH_MISSING, Common, RealtimeTool, ResponsePatch, SessionPatch

# Values at which a setting asks for nothing; any other is refused by name.
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (None, True),
    "prompt": (None,),
    "reasoning": (None,),
    "tracing": (None,),
    "include": (None, []),
}
_INHERITED = ("instructions", "tools", "tool_choice", "max_output_tokens", "temperature")


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a session, or of one response of it."""

    model: str
    instructions: str = ""
    tools: tuple[RealtimeTool, ...] = ()
    tool_choice: str = "auto"
    max_output_tokens: int | Literal["inf"] = "inf"
    temperature: float = 0.8
    truncation: Literal["auto", "disabled"] = "auto"

    def updated(self, patch: SessionPatch) -> Settings:
        """With the fields of `patch` that are present. Nothing changes if one of them is refused."""
        if patch.type == "transcription":
            raise UnsupportedParameter(f"`session.type` transcription: {SPEECH_MISSING}", param="session.type")
        if patch.model is not UNSET and patch.model != self.model:
            message = f"`session.model` cannot change from {self.model!r}; open another connection"
            raise BadRequest(message, param="session.model")
        changed = self._with(patch, "session")
        if patch.truncation is UNSET:
            return changed
        if patch.truncation not in (None, "auto", "disabled"):
            message = "`session.truncation` takes 'auto' or 'disabled' here"
            raise UnsupportedParameter(message, param="session.truncation")
        return replace(changed, truncation=patch.truncation or "auto")

    def for_response(self, patch: ResponsePatch) -> Settings:
        """With the overrides of one response."""
        return self._with(patch, "response")

    def _with(self, patch: Common, where: str) -> Settings:
        _refuse_unsupported(patch, where)
        changes: dict[str, Any] = {name: value for name in _INHERITED if (value := getattr(patch, name)) is not UNSET}
        if "tools" in changes:
            changes["tools"] = tuple(changes["tools"])
        if "tool_choice" in changes:
            check_tool_choice(changes["tool_choice"])
            changes["tool_choice"] = changes["tool_choice"] or "auto"
        if "max_output_tokens" in changes:
            changes["max_output_tokens"] = changes["max_output_tokens"] or "inf"
        return replace(self, **changes)

    def wire_tools(self) -> list[dict[str, Any]]:
        """The tools in the shape of chat requests."""
        return [
            {"type": "function", "function": {k: v for k, v in msgspec.to_builtins(tool).items() if k != "type"}}
            for tool in self.tools
        ]

    def as_session(self, session_id: str) -> dict[str, Any]:
        """The session object of `session.created` and `session.updated`."""
        pcm = {"type": "audio/pcm", "rate": 24000}
        silent_input = {"format": pcm, "transcription": None, "noise_reduction": None, "turn_detection": None}
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": session_id,
            "model": self.model,
            "output_modalities": ["text"],
            "instructions": self.instructions,
            "tools": [{"type": "function", **msgspec.to_builtins(tool)} for tool in self.tools],
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": True,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "truncation": self.truncation,
            "tracing": None,
            "prompt": None,
            "include": None,
            "audio": {"input": silent_input, "output": {"format": pcm, "voice": None, "speed": 1.0}},
        }


def _refuse_unsupported(patch: Common, where: str) -> None:
    if patch.output_modalities is not UNSET and patch.output_modalities != ["text"]:
        param = f"{where}.output_modalities"
        raise UnsupportedParameter(f"`{param}` must be ['text']: {SPEECH_MISSING}", param=param)
    if patch.audio is not UNSET and (path := _first_set(patch.audio, f"{where}.audio")):
        raise UnsupportedParameter(f"`{path}`: {SPEECH_MISSING}", param=path)
    for name, accepted in _NO_EFFECT.items():
        value = getattr(patch, name, UNSET)
        if value is not UNSET and value not in accepted:
            message = f"`{where}.{name}` is not supported; omit it"
            raise UnsupportedParameter(message, param=f"{where}.{name}")


def _first_set(value: Any, path: str) -> str | None:
    """The path of the first setting that is not null: null everywhere asks for no speech."""
    if isinstance(value, dict):
        return next((found for key, inner in value.items() if (found := _first_set(inner, f"{path}.{key}"))), None)
    return None if value is None else path
