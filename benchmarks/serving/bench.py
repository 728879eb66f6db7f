"""Provide engines and prompts to experiments with one random model.

It needs no network: what also starts a stack is in `serving.py`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine.checkpoint import SHAPES, random_checkpoint
from benchmarks.engine.replay import Job, Limits, Replay, reserve_half
from benchmarks.serving.goodput import Trace
from benchmarks.support.measures import Target
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.engine.model_runner import ModelRunner


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how much is measured; lengths are in tokens."""

    shape: str = "middle"
    device: str = "cpu"
    weights: str = "auto"
    threads: int = 0
    long_prompt: int = 2000  # prompt of the prefix and the chunked prefill experiments
    streams: int = 8  # running while long prompts arrive
    arrivals: int = 2  # of long prompts
    repeats: int = 3
    pairs: int = 24  # of the prefix cache's cost
    batch: int = 16  # requests of a run with and without prefix cache
    prompt: int = 128
    output: int = 64
    stack_streams: int = 32
    stack_output: int = 160
    stack_pairs: int = 3
    trace: Trace = field(default_factory=Trace)
    limits: Limits = field(default_factory=Limits)
    pool: int = 16384  # tokens that the KV cache holds in the goodput experiment
    latency_goal: float = 0.1  # seconds; the engine's setting for these limits
    first_rate: float = 2.0
    probes: int = 4


QUICK = Plan(
    shape="tiny",
    long_prompt=200,
    streams=2,
    arrivals=1,
    repeats=1,
    pairs=2,
    batch=2,
    prompt=16,
    output=12,
    stack_streams=2,
    stack_output=24,
    stack_pairs=1,
    trace=Trace(seconds=0.3, prefix=32, prompt=16, output=4, limit=16),
    limits=Limits(ttft=20.0, itl=5.0),  # large enough for a busy machine
    pool=2048,
    first_rate=20.0,
    probes=0,
)


@dataclass
class Findings:
    rows: list[list[str]] = field(default_factory=list)  # what, how much
    targets: list[Target] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


# Settings that determine which model is loaded, and where.
MODEL_SETTINGS = (
    "weights",
    "kv_dtype",
    "num_blocks",
    "max_running",
    "cuda_graphs",
    "deterministic",
)


class Bench:
    """Provide the checkpoint and new prompts to all experiments, and collect their findings."""

    def __init__(self, plan: Plan, cache: Path):
        self.plan = plan
        self.findings = Findings()
        self.folder = random_checkpoint(plan.shape, cache)
        self.vocab: int = SHAPES[plan.shape]["vocab_size"]
        self._draw = random.Random(0)

    def tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self.vocab) for _ in range(count)]

    def engine(
        self, runner: ModelRunner | None = None, half: int | None = None, **changes: Any
    ) -> Engine:
        """Return an engine with `changes` to its settings.

        runner: model runner of another engine to share; None: a new one. half: half of the blocks
        that it uses, 0 or 1; None: all.
        """
        plan = self.plan
        settings = {
            "device": plan.device,
            "weights": plan.weights,
            "threads": plan.threads,
            "num_blocks": self._blocks,
            **changes,
        }
        engine = Engine(EngineConfig(model=str(self.folder), **settings), runner)
        if half is not None:
            reserve_half(engine, half)
        Replay(
            engine, [Job(0.0, self.tokens(40), 4), Job(0.0, self.tokens(40), 4)]
        ).run()  # warm-up
        while engine.take_memory():  # as its service does until the first request
            pass
        return engine

    @property
    def _blocks(self) -> int:
        plan = self.plan
        longest = plan.long_prompt + plan.prompt + plan.output * 16
        return -(-longest // 16) * 4 + plan.batch * (plan.prompt + plan.output)

    def pair(self, one: dict[str, Any], other: dict[str, Any]) -> tuple[Engine, Engine]:
        """Return two engines to run in turn, sharing one model unless model settings differ.

        Two copies of the same model have differed in speed by a third. Engines that share a model
        have a half each of twice the blocks.
        """
        if any(one.get(name) != other.get(name) for name in MODEL_SETTINGS):
            return self.engine(**one), self.engine(**other)
        blocks = {"num_blocks": 2 * one.get("num_blocks", self._blocks)}
        engine = self.engine(half=0, **{**one, **blocks})
        return engine, self.engine(engine.runner, half=1, **{**other, **blocks})

    def report(self, what: str, value: str) -> None:
        print(f"  {what}: {value}", flush=True)
        self.findings.rows.append([what, value])
