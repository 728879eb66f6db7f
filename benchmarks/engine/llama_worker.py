"""Run llama.cpp under the load of `llm.py`, in an environment of its own.

python -m benchmarks.engine.llama_worker convert FOLDER FILE.gguf FORMAT    a checkpoint of Qwen3's architecture to a
GGUF file

python -m benchmarks.engine.llama_worker measure '<JSON of a task>'         prints JSON, as `engine.worker` does

It needs only numpy, gguf and llama-cpp-python. Calls are low-level: one `llama_decode` per step
with a token of every sequence. For every number of sequences, the fastest of flash attention on or
off and one or several KV buffers is chosen and reported.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

CALIBRATION_STEPS = 8
UBATCH = 512


# --------------------------------------------------------------------------------------------------------- measurement
@dataclass
class Context:
    """Hold one llama context for a number of sequences."""

    model: Any
    sequences: int
    tokens: int  # per sequence
    threads: int
    flash: bool
    unified: bool

    def __enter__(self) -> Context:
        params = llama_cpp.llama_context_default_params()
        # A buffer per sequence has a multiple of 256 cells.
        cells = -(-self.tokens // 256) * 256
        params.n_ctx = self.sequences * cells
        params.n_batch = max(UBATCH, self.sequences)
        params.n_ubatch = UBATCH
        params.n_seq_max = self.sequences
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if self.flash
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.kv_unified = self.unified
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self.model, params)
        if not self._context:
            raise RuntimeError("llama.cpp could not make a context")
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, sequence, draws); return greedy next tokens where draws is set."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, draws) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = (
                token,
                position,
                1,
                draws,
            )
            batch.seq_id[i][0] = sequence
        if (code := llama_cpp.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode ended with {code}")
        return [self._likeliest(i) for i, entry in enumerate(entries) if entry[3]]

    def _likeliest(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self._vocab,))))

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Compute whole prompts, in batches of UBATCH tokens; return the first token of each."""
        entries = [
            (t, i, s, i == len(p) - 1) for s, p in enumerate(prompts) for i, t in enumerate(p)
        ]
        return [
            t for i in range(0, len(entries), UBATCH) for t in self.decode(entries[i : i + UBATCH])
        ]

    def run(self, prompts: Sequence[Sequence[int]], output: int) -> dict[str, Any]:
        """Generate; return the start and the time of every token of every sequence."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        start = time.perf_counter()
        tokens = self.prefill(prompts)
        first, steps = tokens, [time.perf_counter()]
        for step in range(output - 1):
            tokens = self.decode(
                [
                    (t, len(p) + step, s, True)
                    for s, (t, p) in enumerate(zip(tokens, prompts, strict=True))
                ]
            )
            steps.append(time.perf_counter())
        return {"start": start, "times": [steps] * len(prompts), "first": first}


def fastest(
    make: Callable[[bool, bool], Context], prompts: Sequence[Sequence[int]]
) -> tuple[bool, bool]:
    """Return the fastest setting to decode with: flash attention, unified KV buffer."""
    seconds = {}
    for flash, unified in product((True, False), (True, False) if len(prompts) > 1 else (True,)):
        with make(flash, unified) as context:
            steps = context.run(prompts, CALIBRATION_STEPS)["times"][0]
        seconds[flash, unified] = min(after - before for before, after in pairwise(steps))
    return min(seconds, key=lambda setting: seconds[setting])


def measure(
    task: dict[str, Any], prompts: Callable[[int, int, int], list[list[int]]]
) -> dict[str, Any]:
    llama_cpp.llama_backend_init()
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    model = llama_cpp.llama_model_load_from_file(
        task["file"].encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise RuntimeError(f"llama.cpp could not load {task['file']}")
    settings, runs = dict(task.get("settings") or {}), []
    for count in task["concurrency"]:

        def make(flash: bool, unified: bool, count: int = count) -> Context:
            return Context(
                model, count, task["prompt"] + task["output"], task["threads"], flash, unified
            )

        if str(count) not in settings:
            settings[str(count)] = fastest(make, prompts(count, task["prompt"], -1))
        with make(*settings[str(count)]) as context:
            runs += [
                {
                    "concurrency": count,
                    **context.run(prompts(count, task["prompt"], 0), task["output"]),
                }
            ]
    prefill = []
    with Context(
        model,
        1,
        task["prefill"] + 1,
        task["threads"],
        settings[str(task["concurrency"][0])][0],
        True,
    ) as context:
        for repeat in range(task["prefills"]):
            run = context.run(prompts(1, task["prefill"], repeat), 1)
            prefill.append(run["times"][0][0] - run["start"])
    return {"runs": runs, "prefill": prefill, "settings": settings, "note": describe(settings)}


def describe(settings: dict[str, tuple[bool, bool]]) -> str:
    """Describe the chosen settings in words."""
    flash = {True: "flash attention", False: "plain attention"}
    buffers = {True: "one KV buffer", False: "a KV buffer per sequence"}
    return "; ".join(
        f"c={count}: {flash[f]}, {buffers[unified]}" for count, (f, unified) in settings.items()
    )


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        from benchmarks.engine.gguf_checkpoint import convert

        convert(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        from benchmarks.engine.prompts import prompts_of

        given = json.loads(sys.argv[2])
        print(json.dumps(measure(given, prompts_of(given["vocab"]))))
