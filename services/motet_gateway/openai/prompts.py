"""Refuse transcription prompts for models that cannot use them."""

from __future__ import annotations

from motet_pipelines.voice.transcribe import ROLE
from motet_shared.errors import UnsupportedParameter
from motet_shared.wire.discovery import Directory
from motet_shared.wire.instances import served


def check_prompt(directory: Directory, model: str, prompt: str | None, param: str) -> None:
    """Raise UnsupportedParameter, naming `param`, if the model was not trained with prompts.

    Such a model takes the prompt for earlier speech and omits the beginning of the audio.
    """
    card = served(directory, ROLE).get(model)
    if prompt and prompt.strip() and card is not None and not card.accepts_prompt:
        message = f"`{param}`: model {model!r} does not support prompts; leave it out"
        raise UnsupportedParameter(message, param=param)
