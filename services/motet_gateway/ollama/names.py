"""Find the model that an Ollama client names: the tag `latest` may be written or left out."""

from __future__ import annotations

from contextlib import suppress

from motet_gateway.context import GatewayContext
from motet_gateway.openai.aliases import model_of
from motet_shared.errors import MotetError, UnknownModel

_LATEST = ":latest"


def chat_model(service: GatewayContext, name: str) -> str:
    """Return the served chat model. Raises as `GatewayContext.admit`."""
    try:
        return service.admit(name)
    except UnknownModel:
        if name.endswith(_LATEST):
            with suppress(UnknownModel):
                return service.admit(name.removesuffix(_LATEST))
        raise


def model_in(service: GatewayContext, role: str, name: str) -> str:
    """Return the served model of a role. Raises as `model_of`."""
    directory = service.bus.directory
    try:
        return model_of(directory, role, name)
    except MotetError:
        if name.endswith(_LATEST):
            with suppress(MotetError):
                return model_of(directory, role, name.removesuffix(_LATEST))
        raise
