"""Sentences of a lower priority, as those of batches, wait for all others."""

from __future__ import annotations

from pathlib import Path

from motet_shared.messages import BACKGROUND
from motet_tts.config import EngineConfig
from motet_tts.engine.engine import Engine
from motet_tts.engine.utterance import Utterance
from support.checkpoints import tts_checkpoints


def test_sentences_of_batches_wait_for_all_others(tmp_path: Path) -> None:
    folder = tts_checkpoints.pocket_tts(tmp_path / "model", sample=True, threshold=0.2)
    engine = Engine(EngineConfig(model=str(folder), max_running=1))
    voice = engine.voices[0]
    for name, priority in (("a", BACKGROUND), ("b", BACKGROUND), ("c", 0), ("d", 0)):
        engine.add(name, Utterance(words=("it", "is"), voice=voice, priority=priority))
    ended: list[object] = []
    while engine.has_work:
        ended += [output.key for output in engine.step() if output.done]
    assert ended == ["c", "d", "a", "b"]
