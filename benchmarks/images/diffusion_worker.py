"""Draw pictures under the loads of `images.py`: `python -m benchmarks.images.diffusion_worker TASK_JSON`.

Runs our engine on its thread, as its service does, and diffusers' own pipeline, serial and in full
batches, in one process on the same weights. Prints JSON.
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
from motet_diffusion.engine.request import Event, Key, PictureDone, PictureRequest, StepDone
from motet_diffusion.engine.thread import EngineThread

_WAIT = 300.0  # seconds at the most for one picture
_PROMPT = "two red circles and a small blue square on the left of a green star"


@dataclass
class PictureTimes:
    """Hold the times of a picture: requested, first previewed, done; in seconds of one clock."""

    requested: float
    previewed: float = 0.0
    done: float = 0.0


class MotetEngine:
    """Run Motet's engine and record the times of its events."""

    def __init__(self, task: dict[str, Any], threads: int):
        config = EngineConfig(
            model=task["folder"], max_running=max(task["inflight"]), threads=threads
        )
        self._times: dict[Key, PictureTimes] = {}
        self._left = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._size, self._steps = task["side"] * task["scale"], task["steps"]
        self._thread = EngineThread(
            Engine(config, self._take), on_outputs=self._finish, on_crash=self._crash
        )
        self._thread.start()

    def close(self) -> None:
        self._thread.stop()

    def limit(self, inflight: int) -> None:
        """Set the number of pictures at a time; only while none is drawn."""
        engine = self._thread.engine
        engine.config = replace(engine.config, max_running=inflight)

    def one(self, seed: int) -> PictureTimes:
        return self.serve([0.0], first=seed)[0]

    def serve(self, arrivals: Sequence[float], first: int = 0) -> list[PictureTimes]:
        """Draw a picture at each of these seconds from now."""
        self._times = {}
        begin = time.perf_counter()
        for number, at in enumerate(arrivals):
            time.sleep(max(begin + at - time.perf_counter(), 0.0))
            self._submit(number, first + number)
        for _ in arrivals:
            self._wait()
        return [self._times[number] for number in range(len(arrivals))]

    def closed(self, count: int, inflight: int) -> float:
        """Return the seconds for `count` pictures, `inflight` at a time (a closed loop)."""
        self._times = {}
        begin = time.perf_counter()
        for number in range(count):
            if number >= inflight:
                self._wait()
            self._submit(number, number)
        for _ in range(min(inflight, count)):
            self._wait()
        return time.perf_counter() - begin

    def _submit(self, key: Key, seed: int) -> None:
        self._times[key] = PictureTimes(time.perf_counter())
        size = {"width": self._size, "height": self._size}
        drawing = PictureRequest(
            prompt=_PROMPT, steps=self._steps, guidance_scale=1.0, seed=seed, previews=2, **size
        )
        self._thread.submit(key, drawing)

    def _wait(self) -> None:
        if not self._left.acquire(timeout=_WAIT):
            raise RuntimeError(f"no picture in {_WAIT:g} s")
        if self._error is not None:
            raise self._error

    def _take(self, event: Event) -> None:
        now, times = time.perf_counter(), self._times[event.key]
        if isinstance(event, StepDone):
            if event.estimate is not None and not times.previewed:
                times.previewed = now
            return
        times.done = now
        self._finish([event])

    def _finish(self, events: list[Event]) -> None:
        for event in events:
            self._error = self._error or (event.error if isinstance(event, PictureDone) else None)
            self._left.release()

    def _crash(self, error: BaseException) -> None:
        self._error = error
        self._left.release()


class DiffusersPipeline:
    """Run diffusers' own pipeline."""

    def __init__(self, task: dict[str, Any]):
        self._pipeline: Any = DiffusionPipeline.from_pretrained(
            task["folder"], low_cpu_mem_usage=False
        )
        self._pipeline.set_progress_bar_config(disable=True)
        self._size, self._steps = task["side"] * task["scale"], task["steps"]

    def draw(self, seeds: Sequence[int]) -> float:
        """Draw pictures of these seeds as one batch; return the time at which they were done."""
        self._pipeline(
            prompt=[_PROMPT] * len(seeds),
            width=self._size,
            height=self._size,
            num_inference_steps=self._steps,
            guidance_scale=1.0,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        )
        return time.perf_counter()

    def serve(self, arrivals: Sequence[float], batch: int) -> list[PictureTimes]:
        """Draw batches of `batch` pictures in order, each once its pictures have arrived."""
        begin, times = time.perf_counter(), [PictureTimes(0.0) for _ in arrivals]
        for first in range(0, len(arrivals), batch):
            members = range(first, min(first + batch, len(arrivals)))
            time.sleep(max(begin + arrivals[members[-1]] - time.perf_counter(), 0.0))
            done = self.draw(members)
            for number in members:
                times[number] = PictureTimes(begin + arrivals[number], done, done)
        return times


def measure(task: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(task["threads"])
    ours, theirs = MotetEngine(task, task["threads"]), DiffusersPipeline(task)
    try:
        ours.one(0)
        theirs.draw([0])
        return {
            "pairs": _pairs(ours, theirs, task["pairs"]),
            "loads": [_load(ours, theirs, n, task) for n in task["inflight"]],
        }
    finally:
        ours.close()


def _pairs(ours: MotetEngine, theirs: DiffusersPipeline, count: int) -> dict[str, list[float]]:
    """Draw one picture at a time by each in turn, alternating which is first."""
    found: dict[str, list[float]] = {"ours": [], "theirs": [], "preview": []}

    def draw_ours(seed: int) -> None:
        times = ours.one(seed)
        found["ours"].append(times.done - times.requested)
        found["preview"].append(
            (times.previewed - times.requested) / (times.done - times.requested)
        )

    def draw_theirs(seed: int) -> None:
        start = time.perf_counter()
        found["theirs"].append(theirs.draw([seed]) - start)

    for number in range(count):
        turns: list[Callable[[int], None]] = (
            [draw_ours, draw_theirs] if number % 2 else [draw_theirs, draw_ours]
        )
        for turn in turns:
            turn(number)
    return found


def _load(
    ours: MotetEngine, theirs: DiffusersPipeline, inflight: int, task: dict[str, Any]
) -> dict[str, Any]:
    """Measure our capacity, then serve the same random arrivals at a share of it by all servers."""
    ours.limit(inflight)
    ours.closed(inflight, inflight)  # warm-up of new shapes
    count = max(task["rounds"] * inflight, task["least"])
    capacity = count / ours.closed(count, inflight)
    arrivals = _poisson(task["share"] * capacity, count, task["seed"])
    servers: dict[str, Callable[[], list[PictureTimes]]] = {
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
    """Return seconds at which `count` pictures are requested; the first at 0."""
    chance = random.Random(seed)
    at, found = 0.0, []
    for _ in range(count):
        found.append(at)
        at += chance.expovariate(rate)
    return found


def _figures(times: Sequence[PictureTimes]) -> dict[str, float]:
    """Return latencies in seconds and pictures/s, over all time and over the busy time."""
    begin, end = times[0].requested, max(one.done for one in times)
    busy, until = 0.0, begin
    for one in sorted(times, key=lambda one: one.requested):
        busy += max(one.done - max(one.requested, until), 0.0)
        until = max(until, one.done)
    return {
        "throughput": len(times) / (end - begin),
        "busy_throughput": len(times) / busy,
        "latency": statistics.median(one.done - one.requested for one in times),
        "worst": max(one.done - one.requested for one in times),
        "preview": statistics.median(
            (one.previewed - one.requested) / (one.done - one.requested) for one in times
        ),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
