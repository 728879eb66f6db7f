"""Run recognition engines over whole sounds, each sound as one window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from motet_asr.checkpoint import load_engine
from motet_asr.config import EngineConfig
from motet_asr.engine.engine import Engine
from motet_asr.engine.request import TranscriptionOptions, WindowResult
from support.checkpoints.asr_checkpoints import RATE


def engine_of(path: Path, **options: Any) -> Engine:
    """Return the engine of a checkpoint; `options` are fields of its EngineConfig."""
    return load_engine(EngineConfig(**{"model": str(path), **options}))


def add(engine: Engine, key: int, sound: Any, **options: Any) -> None:
    """Queue a sound, float32 at 16 kHz; `options` are fields of TranscriptionOptions."""
    engine.add(key, engine.prepare(sound), len(sound) / RATE, TranscriptionOptions(**options))


def run(engine: Engine) -> dict[Any, WindowResult]:
    """Run the engine until it is idle, and return the results by key; no window may fail."""
    heard = {}
    for _ in range(500):
        for output in engine.step():
            assert output.result is not None, output.error
            heard[output.key] = output.result
        engine.check_integrity()
        if not engine.has_work:
            return heard
    raise AssertionError("the engine does not come to an end")
