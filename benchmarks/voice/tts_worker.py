"""Run a speech engine under the load of `voice.py`: `python -m benchmarks.voice.tts_worker TASK_JSON`.

Prints JSON: for each number of streams, of every stream the seconds to its first and its last
sample, and the duration of its speech.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.voice.sentences import SENTENCES
from motet_tts.config import EngineConfig
from motet_tts.engine.engine import Engine
from motet_tts.engine.utterance import Utterance

WARM_FRAMES = 12


def measure(task: dict[str, Any]) -> dict[str, Any]:
    engine = Engine(EngineConfig(model=task["folder"]))
    rows = []
    for streams in task["streams"]:
        _speak(engine, streams, WARM_FRAMES)
        for _ in range(task["repeats"]):
            rows += [
                {"streams": streams, **stream} for stream in _speak(engine, streams, task["frames"])
            ]
    return {"streams": rows, "voices": len(engine.voices), "rate": engine.sample_rate}


def _speak(engine: Engine, streams: int, frames: int) -> list[dict[str, float]]:
    """Synthesize sentences that all begin at once.

    frames: most frames of each; 0: until their end.
    """
    found = [{"first": 0.0, "last": 0.0, "speech": 0.0} for _ in range(streams)]
    start = time.perf_counter()
    for key in range(streams):
        words = tuple(SENTENCES[key % len(SENTENCES)].split())
        engine.add(
            key, Utterance(words=words, voice=engine.voices[0], index=key, max_frames=frames)
        )
    while engine.has_work:
        for piece in engine.step():
            if piece.error is not None:
                raise piece.error
            now, stream = time.perf_counter() - start, found[int(str(piece.key))]
            if piece.samples is not None and len(piece.samples):
                stream["first"] = stream["first"] or now
                stream["last"] = now
                stream["speech"] += len(piece.samples) / engine.sample_rate
    return found


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
