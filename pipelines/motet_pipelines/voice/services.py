"""Find the speech services that a conversation can use."""

from __future__ import annotations

from dataclasses import dataclass

from motet_pipelines.chat.models import check_known, hears, servable
from motet_pipelines.graphs.spoken import speaks_itself
from motet_shared.errors import Unavailable, UnsupportedParameter
from motet_shared.wire.discovery import Directory
from motet_shared.wire.instances import served

from .speech_detection import MODEL as VAD_MODEL

SPEECH_MISSING = "speech needs the asr and tts services, which this server does not run"


@dataclass(frozen=True, slots=True)
class SpeechServices:
    """Speech services of a stack: names of models, empty where no service is ready.

    hears: the chat model gets the user's sound itself, so that nothing need be transcribed.
    itself: the chat model speaks its replies itself; `speech` is its name.
    """

    transcription: str = ""
    turn_detection: bool = False
    speech: str = ""
    hears: bool = False
    itself: bool = False

    @classmethod
    def find(cls, directory: Directory, *, coming: bool = False, model: str = "") -> SpeechServices:
        """Return the services that are ready for conversations with the chat model `model`.

        `coming`: include those that are starting or restarting; requests for them wait.
        """

        def first(role: str) -> str:
            later = [
                name for name in directory.presence.models(role) if directory.is_coming(role, name)
            ]
            return next(iter([*served(directory, role), *(later if coming else [])]), "")

        turn_detection = VAD_MODEL in served(directory, "vad") or (
            coming and directory.is_coming("vad", VAD_MODEL)
        )
        can_hear = bool(model) and hears(directory, model, coming=coming)
        itself = bool(model) and (
            speaks_itself(directory, model)
            or (coming and first("tts") == model and model not in served(directory, "tts"))
        )
        speech = model if itself else first("tts")
        return cls(first("asr"), turn_detection, speech, can_hear, itself)

    @property
    def listens(self) -> bool:
        """Return True if sound of the user can be understood: transcribed, or heard by the model."""
        return bool(self.transcription) or self.hears

    @property
    def missing(self) -> list[str]:
        """Return the roles without a ready service."""
        found = {"asr": self.transcription, "vad": self.turn_detection, "tts": self.speech}
        return [role for role, name in found.items() if not name]

    @property
    def missing_to_talk(self) -> list[str]:
        """Return the roles that a spoken conversation lacks; a model that hears needs no asr."""
        return [role for role in self.missing if role != "asr" or not self.hears]

    def need(
        self,
        param: str,
        *,
        transcription: bool = False,
        listening: bool = False,
        turn_detection: bool = False,
        speech: bool = False,
    ) -> None:
        """Raise UnsupportedParameter if a service is missing that `param` asks for.

        listening: to understand the user, for which a model that hears needs no transcription.
        """
        transcription |= listening and not self.hears
        wanted = {"asr": transcription, "vad": turn_detection, "tts": speech}
        if missing := [role for role in self.missing if wanted[role]]:
            message = f"`{param}`: {SPEECH_MISSING} (no {' and no '.join(missing)} is ready)"
            raise UnsupportedParameter(message, param=param)


async def model_of_conversation(
    directory: Directory, model: str = "", patience: float = 10.0
) -> str:
    """Return a chat model to talk to, once a conversation with it can begin.

    "": the first served one that a conversation can be held with. Raises Unavailable if a service
    is missing after `patience` seconds, UnknownModel for a model that is not served.
    """

    def able(found: Directory) -> list[str]:
        names = [model] if model else servable(found)
        return [n for n in names if not SpeechServices.find(found, model=n).missing_to_talk]

    try:
        found: list[str] = await directory.wait_for(
            lambda found: servable(found) and able(found), patience
        )
    except TimeoutError:
        if model and servable(directory):
            check_known(directory, model)
        chat = [] if servable(directory) else ["chat"]
        lacking = SpeechServices.find(directory, model=model).missing_to_talk
        raise Unavailable(
            "a conversation needs chat, vad, tts, and asr or a model that hears;"
            f" not ready: {', '.join([*chat, *lacking])}"
        ) from None
    if model:
        check_known(directory, model)
    return found[0]
