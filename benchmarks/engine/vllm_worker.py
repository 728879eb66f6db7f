"""Run vLLM under the load of `llm.py`, in an environment of its own.

python -m benchmarks.engine.vllm_worker '<JSON of a task>' [turns]     prints JSON, as `engine.worker` does

It needs vLLM only. The engine runs in this process, or in one for each of the task's `ranks`, and
is driven step by step, without tokenizer, detokenizer and server.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.engine.prompts import prompts_of
from benchmarks.engine.turns import serve

_CACHE = "2"  # GiB of keys and values, unless the environment says otherwise


def set_environment(threads: int, ranks: int = 1) -> None:
    """Have vLLM compute on as many processors as the other engines, divided among its ranks."""
    processors = list(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    each = max(1, len(processors) // ranks)
    bound = [",".join(processors[i : i + each]) for i in range(0, each * ranks, each)]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CACHE)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(bound))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"


class Vllm:
    """Drive one loaded model."""

    def __init__(self, task: dict[str, Any]):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        longest = max(task["prompt"] + task["output"], task["prefill"] + 1)
        arguments = EngineArgs(
            model=task["folder"],
            dtype=task["format"],
            max_model_len=longest + 1,
            max_num_seqs=max(task["concurrency"]),
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            tensor_parallel_size=task.get("ranks", 1),
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._number = 0

    def run(self, prompts: Sequence[Sequence[int]], output: int) -> dict[str, Any]:
        """Generate greedily; return the start and the time of every token of every sequence."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            max_tokens=output,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        times: list[list[float]] = [[] for _ in prompts]
        first = [0] * len(prompts)
        self._number += 1
        start = time.perf_counter()
        for index, prompt in enumerate(prompts):
            key = f"{self._number}/{index}"
            self._engine.add_request(key, {"prompt_token_ids": list(prompt)}, sampling)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for one in outputs:
                stream, ids = int(one.request_id.rpartition("/")[2]), one.outputs[0].token_ids
                if ids and not times[stream]:
                    first[stream] = ids[0]
                times[stream] += [now] * len(ids)
        return {"start": start, "times": times, "first": first}


def measure(
    task: dict[str, Any], prompts: Callable[[int, int, int], list[list[int]]]
) -> dict[str, Any]:
    """Return the results of a task, as `engine.worker` measures them."""
    import vllm

    engine = Vllm(task)
    engine.run(prompts(2, 8, -1), 3)  # warm-up
    runs = []
    for count in task["concurrency"]:
        engine.run(prompts(count, 8, -1), 2)
        found = engine.run(prompts(count, task["prompt"], 0), task["output"])
        runs.append({"concurrency": count, **found})
    prefill = []
    for repeat in range(task["prefills"]):
        run = engine.run(prompts(1, task["prefill"], repeat), 1)
        prefill.append(run["times"][0][0] - run["start"])
    return {"runs": runs, "prefill": prefill, "note": f"vLLM {vllm.__version__}"}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    set_environment(given["threads"], given.get("ranks", 1))
    if sys.argv[2:] == ["turns"]:
        serve(Vllm(given), prompts_of(given["vocab"]))
    else:
        print(json.dumps(measure(given, prompts_of(given["vocab"]))), flush=True)
