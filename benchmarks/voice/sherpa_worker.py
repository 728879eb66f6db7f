"""Run sherpa-onnx on an exported VITS: `python -m benchmarks.voice.sherpa_worker TASK_JSON`.

It needs only sherpa-onnx. Prints JSON, as `voice.tts_worker`, for one sentence at a time; the first
sample is there with the last one, since the model computes a sentence as a whole.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import sherpa_onnx


def measure(task: dict[str, Any]) -> dict[str, Any]:
    folder = Path(task["folder"])
    vits = sherpa_onnx.OfflineTtsVitsModelConfig(
        model=str(folder / task["model"]),
        tokens=str(folder / task["tokens"]),
        noise_scale=0.0,
        noise_scale_w=0.0,
        length_scale=1.0,
    )
    model = sherpa_onnx.OfflineTtsModelConfig(vits=vits, num_threads=task["threads"])
    speaker = sherpa_onnx.OfflineTts(sherpa_onnx.OfflineTtsConfig(model=model, silence_scale=1.0))
    rows = []
    for run in range(1 + task["repeats"]):
        start = time.perf_counter()
        audio = speaker.generate(task["text"])
        taken = time.perf_counter() - start
        speech = len(audio.samples) / audio.sample_rate
        if run:  # the first one warms up
            rows.append({"streams": 1, "first": taken, "last": taken, "speech": speech})
    return {"streams": rows, "samples": len(audio.samples), "loudest": max(map(abs, audio.samples))}


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
