"""What a client may set about sound: formats, turn detection, transcription, the voice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from motet_pipelines.instances import served
from motet_pipelines.listen import MODEL as VAD_MODEL
from motet_shared.discovery import Directory
from motet_shared.errors import BadRequest, UnsupportedParameter

from ..aliases import model_of
from ..fields import Strict
from .setting import Setting, wire
from .turn_detection import TurnDetection

SPEECH_MISSING = "speech needs the asr and tts services, which this server does not run"


# --------------------------------------------------------------------------------------------------- as clients say it
class Pcm(Setting, frozen=True, tag="audio/pcm"):
    rate: Literal[24000] = 24000


class MuLaw(Setting, frozen=True, tag="audio/pcmu"):
    """G.711 at 8 kHz."""


class ALaw(Setting, frozen=True, tag="audio/pcma"):
    """G.711 at 8 kHz."""


Format = Pcm | MuLaw | ALaw
PCM = Pcm()


class Transcription(Setting, frozen=True):
    model: str | None = None
    language: str | None = None
    prompt: str | None = None


class VoiceId(Setting, frozen=True):
    id: str


class InputPatch(Strict):
    format: Format | UnsetType | None = UNSET
    transcription: Transcription | UnsetType | None = UNSET
    noise_reduction: Any = UNSET
    turn_detection: TurnDetection | UnsetType | None = UNSET


class OutputPatch(Strict):
    format: Format | UnsetType | None = UNSET
    voice: str | VoiceId | UnsetType | None = UNSET
    speed: Annotated[float, Meta(ge=0.25, le=1.5)] | UnsetType | None = UNSET


class AudioPatch(Strict):
    input: InputPatch | UnsetType | None = UNSET
    output: OutputPatch | UnsetType | None = UNSET


# ------------------------------------------------------------------------------------------------------- as they stand
@dataclass(frozen=True, slots=True)
class Speech:
    """What this server can do with sound: names of models, empty where no service is ready."""

    ears: str = ""
    turns: bool = False
    voice: str = ""

    @classmethod
    def here(cls, directory: Directory) -> Speech:
        asr, tts = (next(iter(served(directory, role)), "") for role in ("asr", "tts"))
        return cls(asr, VAD_MODEL in served(directory, "vad"), tts)

    @property
    def missing(self) -> list[str]:
        """Roles without a ready service."""
        there = {"asr": self.ears, "vad": self.turns, "tts": self.voice}
        return [role for role, found in there.items() if not found]

    def need(self, param: str, *, ears: bool = False, turns: bool = False, voice: bool = False) -> None:
        """UnsupportedParameter if a service is missing that `param` asks for."""
        wanted = {"asr": ears, "vad": turns, "tts": voice}
        if missing := [role for role in self.missing if wanted[role]]:
            message = f"`{param}`: {SPEECH_MISSING} (no {' and no '.join(missing)} is ready)"
            raise UnsupportedParameter(message, param=param)


@dataclass(frozen=True, slots=True)
class AudioSettings:
    """`session.audio`."""

    input_format: Format = PCM
    transcription: Transcription | None = None
    turn_detection: TurnDetection | None = None
    output_format: Format = PCM
    voice: str | None = None
    speed: float = 1.0

    def updated(self, patch: AudioPatch, where: str, speech: Speech) -> AudioSettings:
        """With the fields of `patch` that are present. Raises for what nobody here can do."""
        changes = _input_changes(patch.input, f"{where}.input", speech)
        changes |= _output_changes(patch.output, f"{where}.output", speech)
        return replace(self, **changes)

    def as_session(self) -> dict[str, Any]:
        return {
            "input": {
                "format": wire(self.input_format),
                "transcription": wire(self.transcription),
                "noise_reduction": None,
                "turn_detection": wire(self.turn_detection),
            },
            "output": self.as_output(),
        }

    def as_output(self) -> dict[str, Any]:
        return {"format": wire(self.output_format), "voice": self.voice, "speed": self.speed}


NO_SETTINGS = AudioSettings()


def _input_changes(patch: InputPatch | UnsetType | None, where: str, speech: Speech) -> dict[str, Any]:
    if patch is None or patch is UNSET:
        return {}
    if patch.noise_reduction not in (UNSET, None):
        param = f"{where}.noise_reduction"
        raise UnsupportedParameter(f"`{param}` is not supported; omit it or send null", param=param)
    changes: dict[str, Any] = {}
    if patch.format is not UNSET:
        changes["input_format"] = patch.format or Pcm()
        if patch.format is not None:
            speech.need(f"{where}.format", ears=True)
    if patch.transcription is not UNSET:
        changes["transcription"] = patch.transcription
        if patch.transcription is not None:
            speech.need(f"{where}.transcription", ears=True)
    if patch.turn_detection is not UNSET:
        changes["turn_detection"] = patch.turn_detection
        if patch.turn_detection is not None:
            speech.need(f"{where}.turn_detection.type", ears=True, turns=True)
    return changes


def _output_changes(patch: OutputPatch | UnsetType | None, where: str, speech: Speech) -> dict[str, Any]:
    if patch is None or patch is UNSET:
        return {}
    changes: dict[str, Any] = {}
    if patch.format is not UNSET:
        changes["output_format"] = patch.format or Pcm()
    if patch.voice is not UNSET:
        changes["voice"] = patch.voice.id if isinstance(patch.voice, VoiceId) else patch.voice
    if patch.speed is not UNSET:
        changes["speed"] = 1.0 if patch.speed is None else patch.speed
    for name in ("format", "voice", "speed"):
        if getattr(patch, name) not in (UNSET, None):
            speech.need(f"{where}.{name}", voice=True)
    return changes


def listener(directory: Directory, transcription: Transcription | None) -> str:
    """The model that a session is heard by. UnknownModel or Unavailable if there is none."""
    return model_of(directory, "asr", (transcription and transcription.model) or "")


def check_voice(directory: Directory, new: AudioSettings, old: AudioSettings, spoken: bool, where: str) -> None:
    """BadRequest for a voice that the model has not, or another one than was heard already."""
    voice, param = new.voice, f"{where}.audio.output.voice"
    if voice != old.voice and spoken:
        raise BadRequest(f"`{param}` cannot change once the model has spoken", param=param)
    card = next(iter(served(directory, "tts").values()), None)
    if voice is None or card is None or voice in card.voices or voice in OPENAI_VOICES:
        return
    raise BadRequest(f"`{param}` is {voice!r}; choose one of {', '.join(card.voices)}", param=param)


OPENAI_VOICES = frozenset("alloy ash ballad cedar coral echo fable marin nova onyx sage shimmer verse".split())
