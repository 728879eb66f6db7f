"""Run one engine under the load of `llm.py`: `python -m benchmarks.engine.worker TASK_JSON`.

Prints JSON: for each number of sequences the start and the time of every token, and the seconds of
each prefill. With a second argument, `turns`, it serves runs on request (`turns.py`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from benchmarks.engine.prompts import prompts_of
from benchmarks.engine.turns import serve
from motet_shared.process.starts import collect_rarely

Run = dict[str, Any]


class Driver(Protocol):
    """Drive a loaded engine.

    `run` generates `output` tokens greedily for all prompts at a time, ignoring end tokens.
    """

    def run(self, prompts: Sequence[Sequence[int]], output: int) -> Run: ...

    def describe(self) -> str: ...


class Motet:
    """Drive our engine as its service does: a step's tokens are emitted during the next step."""

    def __init__(self, task: dict[str, Any]):
        from motet_llm.config import EngineConfig
        from motet_llm.engine.engine import Engine

        most = max(task["concurrency"])
        longest = max(task["prompt"] + task["output"], task["prefill"] + 1)
        blocks = most * (-(-longest // 16) + 2)
        config = EngineConfig(
            model=task["folder"], weights=task["format"], threads=task["threads"], num_blocks=blocks,
            max_running=most, device=task["device"], **task.get("options", {}),
        )  # fmt: skip
        self._engine = Engine(config)
        collect_rarely()

    def run(self, prompts: Sequence[Sequence[int]], output: int) -> Run:
        from motet_llm.engine.outputs import StepOutput
        from motet_shared.messages import Sampling

        engine = self._engine
        times: list[list[float]] = [[] for _ in prompts]
        first = [0] * len(prompts)
        while engine.take_memory():  # as its service does while there are no requests
            pass

        def emit(outputs: list[StepOutput]) -> None:
            now = time.perf_counter()
            for item in outputs:
                if item.error is not None:
                    raise item.error
                stream = int(str(item.key))
                if not times[stream]:
                    first[stream] = item.ids[0]
                times[stream] += [now] * len(item.ids)

        start = time.perf_counter()
        for index, prompt in enumerate(prompts):
            engine.add(
                str(index),
                list(prompt),
                Sampling(max_tokens=output, temperature=0.0, ignore_eos=True),
            )
        while engine.has_work:
            emit(engine.step(emit))
        return {"start": start, "times": times, "first": first}

    def describe(self) -> str:
        stats = self._engine.stats()
        return f"{stats['model_seconds']:.1f} s in the model, {stats['python_seconds']:.1f} s between steps"


class Generate:
    """Drive transformers' `generate`: one static batch, its default cache."""

    def __init__(self, task: dict[str, Any]):
        self._model = load(task)

    def run(self, prompts: Sequence[Sequence[int]], output: int) -> Run:
        from transformers import GenerationConfig

        steps: list[float] = []

        def note(ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
            steps.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        config = GenerationConfig(max_new_tokens=output, do_sample=False, pad_token_id=0)
        ids = torch.tensor(prompts, device=self._model.device)
        start = time.perf_counter()
        # The model's own generation_config would bring its EOS back in.
        self._model.generation_config.eos_token_id = None
        answer = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            stopping_criteria=[note],
        )
        return {
            "start": start,
            "times": [steps] * len(prompts),
            "first": answer[:, ids.shape[1]].tolist(),
        }

    def describe(self) -> str:
        return f"attention {self._model.config._attn_implementation}"


class ContinuousBatching:
    """Drive transformers' `generate_batch`: continuous batching with a paged cache."""

    def __init__(self, task: dict[str, Any]):
        self._model = load(task)
        self._tokens = max(task["prompt"] + task["output"], task["prefill"] + 1)
        self._most = max(task["concurrency"])

    def run(self, prompts: Sequence[Sequence[int]], output: int) -> Run:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        config = GenerationConfig(
            max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        pages = 32
        batching = ContinuousBatchingConfig(
            page_size=pages, num_blocks=self._most * (-(-self._tokens // pages) + 1), max_batch_tokens=512,
            allow_block_sharing=False,
        )  # fmt: skip
        start = time.perf_counter()
        answers = self._model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=config,
            continuous_batching_config=batching,
            record_timestamps=True,
            warmup=False,
        )
        ordered = [
            answers[key] for key in sorted(answers, key=lambda key: int(key.rpartition("_")[2]))
        ]
        if failed := [answer.error for answer in ordered if answer.error]:
            raise RuntimeError(f"continuous batching: {failed[0]}")
        times = [list(answer.timestamps) for answer in ordered]
        return {
            "start": start,
            "times": times,
            "first": [answer.generated_tokens[0] for answer in ordered],
        }

    def describe(self) -> str:
        return f"attention {self._model.config._attn_implementation}"


def load(task: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(task["threads"])
    dtype = getattr(torch, task["format"])
    model = AutoModelForCausalLM.from_pretrained(task["folder"], dtype=dtype, local_files_only=True)
    return model.to(task["device"]).eval()


DRIVERS: dict[str, type[Driver]] = {
    "motet": Motet,
    "generate": Generate,
    "continuous": ContinuousBatching,
}


def measure(task: dict[str, Any]) -> dict[str, Any]:
    prompts = prompts_of(task["vocab"])
    driver = DRIVERS[task["driver"]](task)  # type: ignore[call-arg]
    guard: AbstractContextManager[Any] = (
        nullcontext() if task["driver"] == "motet" else torch.inference_mode()
    )
    with guard:
        driver.run(prompts(2, 8, -1), 3)  # warm-up
        runs = []
        for count in task["concurrency"]:
            runs.append(
                {
                    "concurrency": count,
                    **driver.run(prompts(count, task["prompt"], 0), task["output"]),
                }
            )
        prefill = []
        for repeat in range(task["prefills"]):
            run = driver.run(prompts(1, task["prefill"], repeat), 1)
            prefill.append(run["times"][0][0] - run["start"])
    return {"runs": runs, "prefill": prefill, "note": driver.describe()}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if sys.argv[2:] == ["turns"]:
        serve(Motet(given), prompts_of(given["vocab"]))
    else:
        print(json.dumps(measure(given)))
