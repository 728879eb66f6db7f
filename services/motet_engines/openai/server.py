"""Read from a server which models it has, and what kind of server it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from motet_engines.config import EnginesConfig
from motet_shared.errors import ConfigError, Unavailable

from .connection import Connection
from .dialects import DIALECTS, ServerDialect, dialect_of


@dataclass(frozen=True, kw_only=True)
class Server:
    """Describe a server: the model's name there, its context (0: not told), adapters of the model."""

    dialect: ServerDialect
    model: str
    context: int = 0
    adapters: tuple[str, ...] = ()


async def read_server(connection: Connection, config: EnginesConfig) -> Server:
    """Read GET /models: return the served model, its context and its adapters.

    Raises Unavailable if the server does not answer or still starts the model, ConfigError if it
    has no such model.
    """
    models = _models(await connection.get("/models"))
    dialect = _dialect(models, config)
    wanted = config.engine_model or config.model_name
    model = next((one for one in models if one.get("id") == wanted), None)
    bases = [one for one in models if not one.get("parent")]
    if model is None and not config.engine_model and len(bases) == 1:
        model = bases[0]
    if model is None:
        known = ", ".join(str(one.get("id")) for one in models[:20]) or "none"
        raise ConfigError(
            f"engine_model={wanted!r}: the server has no such model; it has {known}",
            param="engine_model",
        )
    if model.get("status") == "starting":  # a stack of Motet whose model still loads
        raise Unavailable(f"the server's model {model['id']!r} is still starting")
    adapters = tuple(str(one["id"]) for one in models if one.get("parent") == model["id"])
    return Server(
        dialect=dialect, model=str(model["id"]), context=_context(model), adapters=adapters
    )


def _dialect(models: list[dict[str, Any]], config: EnginesConfig) -> ServerDialect:
    if config.engine_dialect != "auto":
        return DIALECTS[config.engine_dialect]
    return DIALECTS["llama.cpp"] if config.engine == "llama.cpp" else dialect_of(models)


def _models(data: bytes) -> list[dict[str, Any]]:
    try:
        document = msgspec.json.decode(data)
        models = document["data"]
        if not all(isinstance(model["id"], str) for model in models):
            raise TypeError("an id is no text")
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise Unavailable(f"/models of the engine's server is no list of models: {error}") from None
    return list(models)


def _context(model: dict[str, Any]) -> int:
    """Return the context as vLLM, Motet or llama-server (per slot) tell it; 0: not told."""
    meta = model.get("meta")
    found = [
        model.get("max_model_len"),
        model.get("context_length"),
        meta.get("n_ctx") if isinstance(meta, dict) else None,
    ]
    return next((size for size in found if isinstance(size, int) and size > 0), 0)
