"""Map OpenAI's model names to the models of the same kind that are served here.

Clients send these names by default.
"""

from __future__ import annotations

from motet_gateway.http.problems import WrongModelKind
from motet_pipelines.chat.models import CHAT_ROLES, check_known, servable
from motet_shared.errors import Unavailable, UnknownModel
from motet_shared.messages import ModelCard
from motet_shared.wire.discovery import Directory
from motet_shared.wire.instances import check_served, served

CHAT = "chat"  # the roles of CHAT_ROLES, which jointly serve chats, completions and sessions
VIDEO = "video"  # models of the role `diffusion` that make videos; the role stands for the others

# By role: names, each also with a suffix after "-" or "." (a date, a size). The longest match
# decides.
_KNOWN = {
    CHAT: (
        "gpt-3.5-turbo",
        "gpt-4",
        "gpt-4o",
        "gpt-5",
        "gpt-audio",
        "gpt-realtime",
        "chatgpt-4o-latest",
        "o1",
        "o3",
        "o4-mini",
        "claude",
    ),
    "asr": (
        "whisper-1",
        "gpt-transcribe",
        "gpt-live-transcribe",
        "gpt-4o-transcribe",
        "gpt-4o-mini-transcribe",
        "gpt-realtime-whisper",
    ),
    "tts": ("tts-1", "tts-1-hd", "gpt-4o-mini-tts"),
    "diffusion": (
        "dall-e-2",
        "dall-e-3",
        "gpt-image-1",
        "gpt-image-1-mini",
        "gpt-image-1.5",
        "gpt-image-2",
    ),
    VIDEO: ("sora-2", "sora-2-pro"),
    "embedding": ("text-embedding-3-small", "text-embedding-3-large", "text-embedding-ada-002"),
}

# By role: the name of its kind of model, and the endpoint that serves it.
_KINDS = {
    CHAT: ("a chat model", "/v1/chat/completions"),
    "asr": ("a transcription model", "/v1/audio/transcriptions"),
    "tts": ("a speech model", "/v1/audio/speech"),
    "diffusion": ("an image model", "/v1/images/generations"),
    VIDEO: ("a video model", "/v1/videos"),
    "embedding": ("an embedding model", "/v1/embeddings"),
    "ranking": ("a ranker", "/v1/rerank"),
    "speakers": ("a speaker embedding model", "/v1/audio/transcriptions (diarized_json)"),
    "vad": ("a voice activity model", "/v1/realtime"),
}


def model_of(directory: Directory, role: str, name: str) -> str:
    """Return the served model of `role` that `name` refers to; `role` may be CHAT or VIDEO, too.

    One of OpenAI's names for the role refers to any of its models; an empty name does too, except
    in chats. Raises UnknownModel, Unavailable, or WrongModelKind for a model of another role.
    """
    if role == CHAT:
        return _chat_model(directory, name)
    models = _served(directory, role)
    if name not in models:
        _check_kind(directory, role, name)
        if not name or role_of_alias(name) == role:
            coming = _coming(directory, role)
            name = next(iter([*models, *coming]), name or "any")
    check_served(directory, _role_of(role), name)
    return name


def role_of_alias(name: str) -> str:
    """Return the role of which `name` means any model, or "" if it is not an OpenAI name."""
    fits = [
        (len(known), role)
        for role, names in _KNOWN.items()
        for known in names
        if name == known or name.startswith((f"{known}-", f"{known}."))
    ]
    return max(fits)[1] if fits else ""


def _chat_model(directory: Directory, name: str) -> str:
    try:
        check_known(directory, name)
        return name
    except (UnknownModel, Unavailable):
        _check_kind(directory, CHAT, name)
        if role_of_alias(name) == CHAT and (
            models := [*servable(directory), *_coming(directory, "decode")]
        ):
            return models[0]
        raise


def _check_kind(directory: Directory, role: str, name: str) -> None:
    """Raise WrongModelKind if `name`, or the model that it stands for, has another role."""
    for other, (kind, endpoint) in _KINDS.items():
        if other != role and name in _names(directory, other):
            message = f"`model`: {name!r} is {kind}; {endpoint} serves it"
            raise WrongModelKind(message, param="model")
    other = role_of_alias(name)
    if other not in ("", role) and (names := _names(directory, other)):
        kind, endpoint = _KINDS[other]
        message = (
            f"`model`: {name!r} is an alias of {kind}, here {names[0]!r}; {endpoint} serves it"
        )
        raise WrongModelKind(message, param="model")


def _coming(directory: Directory, role: str) -> list[str]:
    """Return the models of a role that are expected, then those that are loaded on demand.

    What an expected model of a shared role makes is known once it is announced.
    """
    shared, offered = _role_of(role), _offered(directory, role)
    known = {card.name: card for beat in directory.instances(shared) for card in beat.models}
    others = [offer.model for offer in directory.presence.offers(shared)]
    expected = [
        name
        for name in directory.presence.models(shared)
        if name not in others and (name not in known or known[name].videos == (role == VIDEO))
    ]
    return [*offered, *expected] if role == VIDEO else [*expected, *offered]


def _offered(directory: Directory, role: str) -> list[str]:
    offers = directory.presence.offers(_role_of(role))
    return [offer.model for offer in offers if offer.videos == (role == VIDEO)]


def _names(directory: Directory, role: str) -> list[str]:
    roles = CHAT_ROLES if role == CHAT else (role,)
    offered = {name for one in roles for name in _offered(directory, one)}
    return sorted(offered.union(_announced(directory, role)))


def _announced(directory: Directory, role: str) -> list[str]:
    roles = CHAT_ROLES if role == CHAT else (_role_of(role),)
    cards = [c for one in roles for beat in directory.instances(one) for c in beat.models]
    return [card.name for card in cards if card.videos == (role == VIDEO)]


def _served(directory: Directory, role: str) -> dict[str, ModelCard]:
    cards = served(directory, _role_of(role))
    return {name: card for name, card in cards.items() if card.videos == (role == VIDEO)}


def _role_of(role: str) -> str:
    """Return the role that serves a kind of models."""
    return "diffusion" if role == VIDEO else role
