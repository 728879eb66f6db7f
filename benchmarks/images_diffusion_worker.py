"""Pictures drawn under the loads of `images.py`: `python images_diffusion_worker.py '<JSON of a task>'`.

Our engine on its thread, as its service has it, and diffusers' own pipeline, alone and with whole batches, in one
process on the same weights. Prints JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import DiffusionPipeline

from motet_diffusion.config import EngineConfig
from motet_diffusion.engine.engine import Engine
from motet_diffusion.engine.request import Done, Drawing, Event, Key, Step
from motet_diffusion.engine.thread import EngineThread

_WAIT = 300.0  # seconds at the most for one picture
_PROMPT = "two red circles and a small blue square on the left of a green star"


@dataclass
class Told:
    """When a picture was asked for, first seen and done; seconds of one clock."""

    asked: float
    seen: float = 0.0
    done: float = 0.0


class Ours:
    """The engine, and when it told what."""

    def __init__(self, task: dict[str, Any], threads: int):
        config = EngineConfig(
            model=task["folder"], max_running=max(task["inflight"]), threads=threads
        )
        self._told: dict[Key, Told] = {}
        self._left = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._size, self._steps = task["side"] * task["scale"], task["steps"]
        self._thread = EngineThread(
            Engine(config, self._take), on_outputs=self._refused, on_crash=self._refuse
        )
        self._thread.start()

    def close(self) -> None:
        self._thread.stop()

    def limit(self, inflight: int) -> None:
        """So many pictures at a time from here on; only while none is drawn."""
        engine = self._thread.engine
        engine.config = replace(engine.config, max_running=inflight)

    def one(self, seed: int) -> Told:
        return self.serve([0.0], first=seed)[0]

    def serve(self, arrivals: Sequence[float], first: int = 0) -> list[Told]:
        """A picture at each of these seconds from now."""
        self._told = {}
        begin = time.perf_counter()
        for number, at in enumerate(arrivals):
            time.sleep(max(begin + at - time.perf_counter(), 0.0))
            self._ask(number, first + number)
        for _ in arrivals:
            self._wait()
        return [self._told[number] for number in range(len(arrivals))]

    def closed(self, count: int, inflight: int) -> float:
        """Seconds for `count` pictures, so many at a time: the next is asked for when one is done."""
        self._told = {}
        begin = time.perf_counter()
        for number in range(count):
            if number >= inflight:
                self._wait()
            self._ask(number, number)
        for _ in range(min(inflight, count)):
            self._wait()
        return time.perf_counter() - begin

    def _ask(self, key: Key, seed: int) -> None:
        self._told[key] = Told(time.perf_counter())
        size = {"width": self._size, "height": self._size}
        drawing = Drawing(
            prompt=_PROMPT, steps=self._steps, guidance_scale=1.0, seed=seed, previews=2, **size
        )
        self._thread.submit(key, drawing)

    def _wait(self) -> None:
        if not self._left.acquire(timeout=_WAIT):
            raise RuntimeError(f"no picture in {_WAIT:g} s")
        if self._error is not None:
            raise self._error

    def _take(self, event: Event) -> None:
        now, told = time.perf_counter(), self._told[event.key]
        if isinstance(event, Step):
            if event.estimate is not None and not told.seen:
                told.seen = now
            return
        told.done = now
        self._refused([event])

    def _refused(self, events: list[Event]) -> None:
        for event in events:
            self._error = self._error or (event.error if isinstance(event, Done) else None)
            self._left.release()

    def _refuse(self, error: BaseException) -> None:
        self._error = error
        self._left.release()


class Theirs:
    """diffusers' own pipeline, as one calls it."""

    def __init__(self, task: dict[str, Any]):
        self._pipeline: Any = DiffusionPipeline.from_pretrained(
            task["folder"], low_cpu_mem_usage=False
        )
        self._pipeline.set_progress_bar_config(disable=True)
        self._size, self._steps = task["side"] * task["scale"], task["steps"]

    def draw(self, seeds: Sequence[int]) -> float:
        """Pictures of these seeds as one batch; when they were done."""
        self._pipeline(
            prompt=[_PROMPT] * len(seeds),
            width=self._size,
            height=self._size,
            num_inference_steps=self._steps,
            guidance_scale=1.0,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        )
        return time.perf_counter()

    def serve(self, arrivals: Sequence[float], batch: int) -> list[Told]:
        """Batches of so many, in order, each begun when it is full or nobody comes any more."""
        begin, told = time.perf_counter(), [Told(0.0) for _ in arrivals]
        for first in range(0, len(arrivals), batch):
            members = range(first, min(first + batch, len(arrivals)))
            time.sleep(max(begin + arrivals[members[-1]] - time.perf_counter(), 0.0))
            done = self.draw(members)
            for number in members:
                told[number] = Told(begin + arrivals[number], done, done)
        return told


def measure(task: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(task["threads"])
    ours, theirs = Ours(task, task["threads"]), Theirs(task)
    try:
        ours.one(0)
        theirs.draw([0])
        return {
            "pairs": _pairs(ours, theirs, task["pairs"]),
            "loads": [_load(ours, theirs, n, task) for n in task["inflight"]],
        }
    finally:
        ours.close()


def _pairs(ours: Ours, theirs: Theirs, count: int) -> dict[str, list[float]]:
    """One picture at a time, by each in turn; whoever begins changes."""
    found: dict[str, list[float]] = {"ours": [], "theirs": [], "preview": []}

    def mine(seed: int) -> None:
        told = ours.one(seed)
        found["ours"].append(told.done - told.asked)
        found["preview"].append((told.seen - told.asked) / (told.done - told.asked))

    def other(seed: int) -> None:
        start = time.perf_counter()
        found["theirs"].append(theirs.draw([seed]) - start)

    for number in range(count):
        turns: list[Callable[[int], None]] = [mine, other] if number % 2 else [other, mine]
        for turn in turns:
            turn(number)
    return found


def _load(ours: Ours, theirs: Theirs, inflight: int, task: dict[str, Any]) -> dict[str, Any]:
    """What we can do with so many at a time, and the same random arrivals at a share of that for all three."""
    ours.limit(inflight)
    ours.closed(inflight, inflight)  # shapes that were not seen yet
    count = max(task["rounds"] * inflight, task["least"])
    capacity = count / ours.closed(count, inflight)
    arrivals = _poisson(task["share"] * capacity, count, task["seed"])
    servers: dict[str, Callable[[], list[Told]]] = {
        "motet": lambda: ours.serve(arrivals),
        "one after the other": lambda: theirs.serve(arrivals, 1),
    }
    if inflight > 1:
        theirs.draw(range(inflight))
        servers["full batches"] = lambda: theirs.serve(arrivals, inflight)
    return {
        "inflight": inflight,
        "capacity": capacity,
        "arrivals": arrivals,
        "served": {name: _figures(serve()) for name, serve in servers.items()},
    }


def _poisson(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which `count` pictures are asked for; the first at once."""
    chance = random.Random(seed)
    at, found = 0.0, []
    for _ in range(count):
        found.append(at)
        at += chance.expovariate(rate)
    return found


def _figures(told: Sequence[Told]) -> dict[str, float]:
    """Seconds; pictures per second, over all the time and over that in which there was something to do."""
    begin, end = told[0].asked, max(one.done for one in told)
    busy, until = 0.0, begin
    for one in sorted(told, key=lambda one: one.asked):
        busy += max(one.done - max(one.asked, until), 0.0)
        until = max(until, one.done)
    return {
        "throughput": len(told) / (end - begin),
        "busy_throughput": len(told) / busy,
        "latency": statistics.median(one.done - one.asked for one in told),
        "worst": max(one.done - one.asked for one in told),
        "preview": statistics.median(
            (one.seen - one.asked) / (one.done - one.asked) for one in told
        ),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
