"""Names of OpenAI's models of speech and of embeddings, which clients send unasked: each stands for what is here."""

from __future__ import annotations

from motet_pipelines.instances import check_served, served
from motet_shared.discovery import Directory

_KNOWN = {
    "asr": (
        "whisper-1",
        "gpt-transcribe",
        "gpt-live-transcribe",
        "gpt-4o-transcribe",
        "gpt-4o-mini-transcribe",
        "gpt-realtime-whisper",
    ),
    "tts": ("tts-1", "tts-1-hd", "gpt-4o-mini-tts"),
    "diffusion": ("dall-e-2", "dall-e-3", "gpt-image-1", "gpt-image-1-mini", "gpt-image-1.5", "gpt-image-2"),
    "embedding": ("text-embedding-3-small", "text-embedding-3-large", "text-embedding-ada-002"),
}


def model_of(directory: Directory, role: str, name: str) -> str:
    """The model of that role which `name` means; "" and OpenAI's names mean any. UnknownModel or Unavailable."""
    models = served(directory, role)
    if name not in models and _is_known(role, name):
        name = next(iter(models), name or "any")
    check_served(directory, role, name)
    return name


def _is_known(role: str, name: str) -> bool:
    """Whether it is no name, or one of OpenAI's, with or without a date."""
    return not name or any(name == known or name.startswith(f"{known}-") for known in _KNOWN[role])
