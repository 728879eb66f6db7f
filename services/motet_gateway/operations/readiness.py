"""Determine whether the configured models can be used, for `/health/ready` and `/v1/models`."""

from __future__ import annotations

from motet_gateway.tenancy.concurrency import ConcurrencyLimits
from motet_pipelines.chat.models import missing, servable
from motet_shared.errors import UnknownModel
from motet_shared.wire.bus import Bus
from motet_shared.wire.discovery import EXPIRES_AFTER
from motet_shared.wire.instances import served

# The kind of model that each role serves, in the order of `/v1/models`.
KINDS = {
    "decode": "chat",
    "tts": "speech",
    "asr": "transcription",
    "embedding": "embedding",
    "ranking": "ranking",
    "diffusion": "image",
}


class Readiness:
    """Track what is served now and what is still waited for.

    The gateway becomes ready when every configured model has served once, and stays ready while any
    model serves: a model that is lost makes its own requests wait, not those of the others.
    """

    def __init__(self, bus: Bus, limits: ConcurrencyLimits):
        self._bus, self._limits = bus, limits
        self._was_ready = False

    def models(self) -> dict[str, str]:
        """Return the kinds of all models that can be used now, by name."""
        return {name: kind for role, kind in KINDS.items() for name in self._served(role)}

    def _served(self, role: str) -> list[str]:
        directory = self._bus.directory
        return list(servable(directory) if role == "decode" else served(directory, role))

    def starting(self, role: str) -> list[str]:
        """Return the configured models of a role that cannot be used now."""
        ready = self._served(role)
        return [name for name in self._bus.directory.presence.models(role) if name not in ready]

    def missing(self, model: str = "") -> list[str]:
        """Return the reasons why `model`, or else the gateway, is not ready; empty if it is.

        Raises UnknownModel for a model that is neither served nor expected.
        """
        problems = ["the gateway is stopping"] if self._limits.draining else []
        if self._bus.broker.silent > EXPIRES_AFTER:
            problems.append("NATS does not answer")
        return problems + (self._missing_for(model) if model else self._missing_at_all())

    def _missing_for(self, model: str) -> list[str]:
        ready = self.models()
        if model in ready:
            return []
        presence = self._bus.directory.presence
        for role in KINDS:
            if (offer := presence.offer(role, model)) is not None:
                return [] if offer.stage != "failed" else [f"{model} cannot be loaded"]
        known = [name for role in KINDS for name in presence.models(role)]
        if model not in known:
            names = ", ".join([*ready, *known]) or "none"
            raise UnknownModel(
                f"model {model!r} does not exist here; available: {names}", param="model"
            )
        return [f"{model} is starting"]

    def _missing_at_all(self) -> list[str]:
        directory = self._bus.directory
        if not self._was_ready and (due := directory.presence.due):
            return [f"{role} for {model} is not ready yet" for role, model in due]
        if self.models() or any(directory.presence.offers(role) for role in KINDS):
            self._was_ready = True
            return []
        return [f"no {role} is ready" for role in missing(directory)] or [
            "no model is served by both a tokenizer and a decode instance"
        ]
