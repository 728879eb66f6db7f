"""Choose how prompts are sent to a server, by asking it for one token."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from motet_engines.card import read_config
from motet_engines.config import EnginesConfig
from motet_engines.grammars import added_tokens
from motet_models.image_support import accepts_images
from motet_shared.errors import BadRequest, ConfigError

from .chat import ChatRoute
from .completions import CompletionsRoute
from .connection import Connection
from .dialects import ServerDialect
from .llama_server import LlamaServerRoute
from .picture_messages import takes_pictures
from .route import Route
from .server import Server
from .text_tokens import TextTokens, read_tokenizer

log = logging.getLogger(__name__)

_PROBE = "The quick brown fox jumps over the lazy"


async def choose_route(connection: Connection, server: Server, config: EnginesConfig) -> Route:
    """Return the route of the setting, or the first that the server answers: ids, text, chat.

    Raises ConfigError if the server's tokens are not those of the model's folder, or if it answers
    none of the routes.
    """
    folder, wanted = Path(config.model), config.engine_route
    if server.dialect.name == "llama.cpp" and wanted in ("auto", "ids"):
        return LlamaServerRoute(TextTokens.load(folder))
    if wanted == "chat":
        return _chat(server, folder)
    try:
        choice = await _one_token(connection, server, folder, ids=wanted != "text")
    except BadRequest as error:
        if wanted != "auto":
            raise ConfigError(
                f"engine_route={wanted!r}: {error.message}", param="engine_route"
            ) from None
        log.warning("prompts are sent as chats: %s", error.message)
        return _chat(server, folder)
    if isinstance(choice.get("token_ids"), list) and wanted != "text":
        _check_vocabulary(choice, folder)
        tokens = added_tokens(folder) if server.dialect.name == "vllm" else {}
        return CompletionsRoute(server.dialect, server.model, tokens=tokens)
    if wanted == "ids":
        raise ConfigError(
            "engine_route='ids': the server returns no token ids; give text or auto",
            param="engine_route",
        )
    log.warning("the server returns no token ids: its text is spelled in tokens again")
    return CompletionsRoute(server.dialect, server.model, TextTokens.load(folder))


async def choose_picture_route(
    connection: Connection, server: Server, config: EnginesConfig
) -> ChatRoute | None:
    """Return the route of chats with pictures; None if the model or the server takes none."""
    folder = Path(config.model)
    if not accepts_images(read_config(folder)):
        return None
    return _chat(server, folder) if await takes_pictures(connection, server) else None


def _chat(server: Server, folder: Path) -> ChatRoute:
    return ChatRoute(server.dialect, server.model, TextTokens.load(folder))


async def _one_token(
    connection: Connection, server: Server, folder: Path, *, ids: bool
) -> dict[str, Any]:
    """Return the choice of a completion of one token. Raises BadRequest if it is refused.

    Parameters that a server does not know are refused by some: without `return_token_ids`, it is
    asked again.
    """
    prompt = read_tokenizer(folder).encode(_PROBE, add_special_tokens=False).ids
    body = _body(server.dialect, server.model, prompt)
    if ids:
        try:
            return _choice(await connection.post("/completions", body | {"return_token_ids": True}))
        except BadRequest as error:
            log.warning("return_token_ids: %s", error.message)
    return _choice(await connection.post("/completions", body))


def _body(dialect: ServerDialect, model: str, prompt: list[int]) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, dialect.max_tokens: 1, "temperature": 0.0}


def _choice(answer: Any) -> dict[str, Any]:
    try:
        choice = answer["choices"][0]
        choice["text"]
    except (KeyError, IndexError, TypeError):
        raise BadRequest("/completions answers without a choice") from None
    return dict(choice)


def _check_vocabulary(choice: dict[str, Any], folder: Path) -> None:
    """Raise ConfigError if the server's ids do not spell its text in the folder's tokens."""
    tokenizer = read_tokenizer(folder)
    try:
        ids = [int(number) for number in choice["token_ids"]]
        spelled = tokenizer.decode(ids, skip_special_tokens=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"engine_url: token_ids of the server: {error}", param="engine_url"
        ) from None
    text = str(choice["text"])
    if text.strip() and spelled.strip() and text.strip() != spelled.strip():
        raise ConfigError(
            f"model={str(folder)!r}: its tokens {ids} spell {spelled!r}, the server's model"
            f" wrote {text!r}; give the folder of the model that the server has",
            param="model",
        )
