"""Run a speech engine together with the decode engine that generates its tokens, on one thread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from motet_llm import config as decode
from motet_llm.engine.engine import Engine as DecodeEngine
from motet_tts.config import EngineConfig
from motet_tts.engine.engine import Engine
from motet_tts.engine.utterance import Key, StepOutput


class TokenSpeaker(Engine):
    """Speak with a language model whose tokens are codes: `step` is a step of both engines."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        sizes: dict[str, Any] = {
            "block_size": 16,
            "num_blocks": 400,
            "max_running": 8,
            "threads": 1,
        }
        self.decode = DecodeEngine(
            decode.EngineConfig(model=config.model, dtype="float32", overlap=False, **sizes)
        )
        self.tokens: dict[Key, list[int]] = {}

    @property
    def has_work(self) -> bool:
        return super().has_work or self.decode.has_work

    def cancel(self, key: Key) -> None:
        super().cancel(key)
        self.decode.cancel(key)

    def step(self) -> list[StepOutput]:
        outputs = []
        for output in super().step():
            if (asked := output.generate) is not None:
                self.tokens[output.key] = []
                self.decode.add(output.key, list(asked.prompt), asked.sampling)
            else:
                outputs.append(output)
        for made in self.decode.step():
            assert made.error is None
            self.tokens[made.key] += made.ids
            self.feed(made.key, made.ids, last=made.finish is not None)
        return outputs


def engine_of(config: EngineConfig) -> Engine:
    """Return an engine for a checkpoint, with the one of its language model if that is apart."""
    settings = json.loads((Path(config.model) / "config.json").read_text())
    return TokenSpeaker(config) if settings.get("model_type") == "llama" else Engine(config)
