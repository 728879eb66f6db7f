"""Run a recognizer under the load of `voice.py`: `python -m benchmarks.voice.asr_worker TASK_JSON`.

Prints JSON: for each length and number of clips the seconds of every run, and of its features and
its encoder alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.voice.clips import RATE, Sound, clips
from benchmarks.voice.timing import Part, Recognizer, Times, measured
from motet_shared.process.starts import collect_rarely


class Motet:
    """Drive our engine as its service does."""

    def __init__(self, task: dict[str, Any]):
        from motet_asr.checkpoint import load_engine
        from motet_asr.config import EngineConfig

        config = EngineConfig(
            model=task["folder"], weights=task["format"], threads=task["threads"], fallback=False,
            **task.get("options", {}),
        )  # fmt: skip
        self._engine: Any = load_engine(config)
        collect_rarely()

    def whole(self, sounds: list[Sound], tokens: int) -> list[list[int]]:
        from motet_asr.engine.request import TranscriptionOptions

        engine, generated = self._engine, {}
        options = TranscriptionOptions(language="en", timestamps=False)
        for key, sound in enumerate(sounds):
            engine.add(key, engine.prepare(sound), len(sound) / RATE, options)
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                generated[output.key] = output.result.tokens
        return [generated[key] for key in range(len(sounds))]

    def parts(self, sounds: list[Sound]) -> dict[Part, float]:
        from motet_asr.engine.engine import WaitingWindow
        from motet_asr.engine.request import TranscriptionOptions
        from motet_asr.engine.slot_engine import RunningWindow

        start = time.perf_counter()
        features = [self._engine.prepare(sound) for sound in sounds]
        middle = time.perf_counter()
        runs = [
            RunningWindow(WaitingWindow(key, TranscriptionOptions(), one, len(sound) / RATE))
            for key, (one, sound) in enumerate(zip(features, sounds, strict=True))
        ]
        size = self._engine.config.encode_batch
        with torch.inference_mode():
            for first in range(0, len(runs), size):
                self._engine.family.encode(runs[first : first + size])
        return {"features": middle - start, "encoder": time.perf_counter() - middle}

    def describe(self) -> str:
        from motet_kernels.runtime import native

        return f"kernels for {native.status()['isa']}"


class Transformers:
    """Drive transformers' pipeline, with the clips as one batch."""

    def __init__(self, task: dict[str, Any]):
        from transformers import (
            AutoFeatureExtractor,
            AutoTokenizer,
            WhisperForConditionalGeneration,
            pipeline,
        )
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(task["threads"])
        self._dtype = getattr(torch, task["format"])
        folder = task["folder"]
        model = WhisperForConditionalGeneration.from_pretrained(
            folder, dtype=self._dtype, local_files_only=True
        )
        self._extractor = AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
        self._pipeline = pipeline(
            "automatic-speech-recognition",
            model=model.eval(),
            feature_extractor=self._extractor,
            tokenizer=AutoTokenizer.from_pretrained(folder, local_files_only=True),
        )
        self._tokens: list[list[int]] = []
        self._generate, model.generate = model.generate, self._generate_and_keep

    def _generate_and_keep(self, *args: Any, **options: Any) -> Any:
        """Call `generate` and keep its tokens, which the pipeline does not return.

        The prompt has four tokens, and none is an end token.
        """
        answer = self._generate(*args, **options)
        tokens = answer["sequences"] if isinstance(answer, dict) else answer
        self._tokens += [row[-self._wanted :] for row in tokens.tolist()]
        return answer

    def whole(self, sounds: list[Sound], tokens: int) -> list[list[int]]:
        self._tokens, self._wanted = [], tokens
        options: dict[str, Any] = {
            "max_new_tokens": tokens,
            "max_length": None,
            "language": "en",
            "task": "transcribe",
        }
        options["num_beams"] = 1  # greedy as ours: the pipeline's own default is a beam of five
        inputs = [{"raw": sound, "sampling_rate": RATE} for sound in sounds]
        self._pipeline(inputs, batch_size=len(sounds), generate_kwargs=options)
        return self._tokens

    def parts(self, sounds: list[Sound]) -> dict[Part, float]:
        start = time.perf_counter()
        features = self._extractor(
            sounds, sampling_rate=RATE, return_tensors="pt"
        ).input_features.to(self._dtype)
        middle = time.perf_counter()
        with torch.inference_mode():
            self._pipeline.model.get_encoder()(features)
        return {"features": middle - start, "encoder": time.perf_counter() - middle}

    def describe(self) -> str:
        return f"attention {self._pipeline.model.config._attn_implementation}"


DRIVERS: dict[str, Callable[[dict[str, Any]], Recognizer]] = {
    "motet": Motet,
    "transformers": Transformers,
}


def measure(task: dict[str, Any]) -> Times:
    return measured(DRIVERS[task["driver"]], task, clips)


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
