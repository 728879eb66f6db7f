"""Define the audio settings of a session: formats, turn detection, transcription and voice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from motet_gateway.audio.voices import PREFIX, cloned_voice
from motet_gateway.context import GatewayContext
from motet_gateway.http.fields import Strict
from motet_gateway.openai.aliases import model_of
from motet_gateway.openai.prompts import check_prompt
from motet_pipelines.graphs.spoken import own_voices
from motet_pipelines.voice.conversation.settings import TranscriptionSettings
from motet_pipelines.voice.services import SpeechServices
from motet_pipelines.voice.speak import ClonedVoice
from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.wire.discovery import Directory
from motet_shared.wire.instances import served

from .settings_base import StrictSettings, wire
from .turn_detection import TurnDetection


# ------------------------------------------------------------------------------------ wire format
class Pcm(StrictSettings, frozen=True, tag="audio/pcm"):
    rate: Literal[24000] = 24000


class MuLaw(StrictSettings, frozen=True, tag="audio/pcmu"):
    """Select G.711 μ-law at 8 kHz."""


class ALaw(StrictSettings, frozen=True, tag="audio/pcma"):
    """Select G.711 A-law at 8 kHz."""


Format = Pcm | MuLaw | ALaw
PCM = Pcm()


class InputTranscription(StrictSettings, frozen=True):
    model: str | None = None
    language: str | None = None
    prompt: str | None = None

    @property
    def settings(self) -> TranscriptionSettings:
        return TranscriptionSettings(
            model=self.model or "", language=self.language or "", prompt=self.prompt or ""
        )


class VoiceId(StrictSettings, frozen=True):
    id: str


ModelInput = Literal["audio", "transcript"]


class InputPatch(Strict):
    format: Format | UnsetType | None = UNSET
    transcription: InputTranscription | UnsetType | None = UNSET
    noise_reduction: Any = UNSET
    turn_detection: TurnDetection | UnsetType | None = UNSET
    model_input: ModelInput | UnsetType | None = UNSET  # extension


class OutputPatch(Strict):
    format: Format | UnsetType | None = UNSET
    voice: str | VoiceId | UnsetType | None = UNSET
    speed: Annotated[float, Meta(ge=0.25, le=1.5)] | UnsetType | None = UNSET


class AudioPatch(Strict):
    input: InputPatch | UnsetType | None = UNSET
    output: OutputPatch | UnsetType | None = UNSET


# ------------------------------------------------------------------------------- effective settings
@dataclass(frozen=True, slots=True)
class AudioSettings:
    """Audio settings of a session, `session.audio`.

    model_input: what the model gets of the user's speech; None: the audio, if it hears and no
    transcription is set, else the transcript. itself: the model speaks its replies itself; by
    default it then gets the audio, transcribed or not.
    """

    input_format: Format = PCM
    transcription: InputTranscription | None = None
    turn_detection: TurnDetection | None = None
    model_input: ModelInput | None = None
    output_format: Format = PCM
    voice: str | None = None
    speed: float = 1.0
    cloned: ClonedVoice | None = None  # set by `with_voice`
    itself: bool = False

    def updated(self, patch: AudioPatch, where: str, speech: SpeechServices) -> AudioSettings:
        """Return the settings with the fields of `patch` that are present.

        Raises UnsupportedParameter for what no service here can do.
        """
        changes = _input_changes(patch.input, f"{where}.input", speech)
        changes |= _output_changes(patch.output, f"{where}.output", speech)
        return replace(self, **changes)

    @property
    def hears(self) -> bool:
        """Return True if a model that hears gets the user's audio instead of a transcript."""
        if self.model_input is None:
            return self.itself or self.transcription is None
        return self.model_input == "audio"

    def as_session(self) -> dict[str, Any]:
        """Return `session.audio`; the extension is shown only to clients that have set it."""
        extension = {} if self.model_input is None else {"model_input": self.model_input}
        return {
            "input": {
                "format": wire(self.input_format),
                "transcription": wire(self.transcription),
                "noise_reduction": None,
                "turn_detection": wire(self.turn_detection),
                **extension,
            },
            "output": self.as_output(),
        }

    def as_output(self) -> dict[str, Any]:
        return {"format": wire(self.output_format), "voice": self.voice, "speed": self.speed}


NO_SETTINGS = AudioSettings()


def _input_changes(
    patch: InputPatch | UnsetType | None, where: str, speech: SpeechServices
) -> dict[str, Any]:
    if patch is None or patch is UNSET:
        return {}
    if patch.noise_reduction not in (UNSET, None):
        param = f"{where}.noise_reduction"
        raise UnsupportedParameter(f"`{param}` is not supported; omit it or send null", param=param)
    changes: dict[str, Any] = {}
    if patch.format is not UNSET:
        changes["input_format"] = patch.format or Pcm()
        if patch.format is not None:
            speech.need(f"{where}.format", listening=True)
    if patch.transcription is not UNSET:
        changes["transcription"] = patch.transcription
        if patch.transcription is not None:
            speech.need(f"{where}.transcription", transcription=True)
    if patch.turn_detection is not UNSET:
        changes["turn_detection"] = patch.turn_detection
        if patch.turn_detection is not None:
            speech.need(f"{where}.turn_detection.type", listening=True, turn_detection=True)
    if patch.model_input is not UNSET:
        changes["model_input"] = patch.model_input
        _check_model_input(patch.model_input, f"{where}.model_input", speech)
    return changes


def _check_model_input(wanted: ModelInput | None, param: str, speech: SpeechServices) -> None:
    """Raise UnsupportedParameter for what the model, or no service here, can do."""
    if wanted == "transcript":
        speech.need(param, transcription=True)
    if wanted == "audio" and not speech.hears:
        raise UnsupportedParameter(
            f"`{param}` is 'audio', but the model does not hear, or no encoder is ready; omit it",
            param=param,
        )


def _output_changes(
    patch: OutputPatch | UnsetType | None, where: str, speech: SpeechServices
) -> dict[str, Any]:
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
            speech.need(f"{where}.{name}", speech=True)
    if speech.itself and changes.get("speed", 1.0) != 1.0:
        raise UnsupportedParameter(
            f"`{where}.speed`: the model speaks at its own pace; omit it or send 1",
            param=f"{where}.speed",
        )
    return changes


def check_transcription(directory: Directory, new: AudioSettings, where: str) -> None:
    """Raise for a prompt that the recognizer of a session cannot use."""
    wanted = new.transcription
    if wanted is not None and wanted.prompt:
        check_prompt(
            directory,
            model_of(directory, "asr", wanted.model or ""),
            wanted.prompt,
            f"{where}.audio.input.transcription.prompt",
        )


async def with_voice(
    service: GatewayContext,
    owner: str,
    new: AudioSettings,
    old: AudioSettings,
    spoken: bool,
    where: str,
    model: str,
) -> AudioSettings:
    """Return the settings with the recording of their voice, if it is one that `owner` made.

    model: the chat model, which may speak itself.

    Raises BadRequest for a voice the model lacks, or a change of voice once it has spoken.
    """
    voice, param = new.voice, f"{where}.audio.output.voice"
    if voice != old.voice and spoken:
        raise BadRequest(f"`{param}` cannot change once the model has spoken", param=param)
    if voice == old.voice:
        return new
    directory = service.bus.directory
    card = own_voices(directory, model) or next(iter(served(directory, "tts").values()), None)
    new = replace(new, cloned=None)
    if voice is None or card is None or voice in card.voices or voice in OPENAI_VOICES:
        return new
    if voice.startswith(PREFIX):
        cloned = await cloned_voice(service, owner, card.name, voice, param)
        return replace(new, cloned=cloned)
    raise BadRequest(f"`{param}` is {voice!r}; choose one of {', '.join(card.voices)}", param=param)


OPENAI_VOICES = frozenset(
    "alloy ash ballad cedar coral echo fable marin nova onyx sage shimmer verse".split()
)
