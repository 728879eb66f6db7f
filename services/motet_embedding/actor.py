"""Run an engine as an actor: what the roles `embedding` and `ranking` share."""

from __future__ import annotations

import logging
from typing import Any

from motet_kernels.runtime.device import readings
from motet_shared.messages import ModelCard
from motet_shared.process.actor import Actor
from motet_shared.wire.bus import Bus

from .config import EmbeddingConfig, EngineConfig
from .engine import Engine, TextModel
from .folder import Folder
from .thread import EmbeddingSessions

log = logging.getLogger(__name__)


class TextActor(Actor):
    """Serve one model over texts; a subclass has the operation, and loads the model in `warm`."""

    config: EmbeddingConfig

    def __init__(self, config: EmbeddingConfig, bus: Bus):
        super().__init__(config, bus)
        self.max_active = config.max_requests
        self._sessions: EmbeddingSessions | None = None
        self._card: ModelCard | None = None

    def serve(self, config: EngineConfig, model: TextModel, folder: Folder, **card: Any) -> None:
        """Start the engine of a loaded model and announce it, with these fields of its card."""
        self._sessions = EmbeddingSessions(Engine(config, model), self.crash)
        self.bus.monitor.duties.append(self._sessions.thread.watch(self.config.step_timeout))
        created = int((folder.transformer / "config.json").stat().st_mtime)
        self._card = ModelCard(name=config.model_name, created=created, **card)
        log.info(
            "model loaded",
            extra={"model": self._card.name, "computes": folder.kind, "packed": model.packed},
        )

    async def close(self) -> None:
        if self._sessions is not None:
            await self._sessions.close()

    @property
    def sessions(self) -> EmbeddingSessions:
        """Return the sessions. Raises RuntimeError before `warm` has loaded the model."""
        if self._sessions is None:
            raise RuntimeError("the model is not loaded yet")
        return self._sessions

    # --------------------------------------------------------------------------------------- health
    def load(self) -> dict[str, float]:
        if self._sessions is None:
            return {}
        stats = self._sessions.thread.stats()
        return {
            "queued": stats["waiting"] + stats["commands"],
            "tokens": stats["tokens"],
            **readings(),
        }

    def models(self) -> list[ModelCard]:
        return [self._card] if self._card else []

    def stats(self) -> dict[str, Any]:
        """Return numbers, which are metrics too, and strings: what was chosen at load time."""
        if self._sessions is None:
            return {}
        return self._sessions.thread.stats() | self._sessions.thread.engine.encoder.describe()

    def check_integrity(self) -> None:
        """Raise RuntimeError if an idle actor still holds engine work."""
        super().check_integrity()
        if not self.bus.calls.active and self.sessions.thread.engine.has_work:
            raise RuntimeError("no call is active, but the engine has work")
