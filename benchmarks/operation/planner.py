"""Compare the planner's simulator with a real local stack under the same traffic.

`python benchmarks/run.py planner --help`. The tables go to standard output, the numbers to
`results/planner.json`.

NATS, the tokenizer, the planner and the starting and stopping of processes are real; the engines
prefill and decode at fixed speeds without computing. The time that one takes to start is measured
first.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from time import monotonic

from benchmarks.stack.fake_engine import FIRST_ID, MODEL, WORDS, save_checkpoint
from benchmarks.stack.spawner import Spawner
from benchmarks.stack.stack import nats_stack
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER
from motet_planner.config import PlannerConfig
from motet_planner.outcome import SimulationOutcome
from motet_planner.policy import RolePolicy
from motet_planner.service import Planner
from motet_planner.simulator import Scenario, simulate
from motet_planner.speed import Speed
from motet_planner.traffic import Arrival, Rate, bursts, generate, lognormal, ramp, steady
from motet_shared.errors import MotetError
from motet_shared.messages import Complete, Sampling, Text
from motet_shared.quantiles import quantile
from motet_shared.testing import NatsServer
from motet_shared.wire.bus import Bus
from motet_shared.wire.stream import Stream

RESULTS = RESULTS_FOLDER / "planner.json"
STEPS = 50.0  # per second of an engine
MAX_DIFFERENCE = 0.2  # share by which simulation and reality may differ
_DISCOVERY_SECONDS = (
    3.0  # seconds before the traffic; the planner's first decision is after half of them
)
_TRACES: dict[str, Callable[[float, float], tuple[Rate, float]]] = {
    "steady": lambda rate, seconds: steady(rate),
    "ramp": ramp,
    "bursts": lambda rate, seconds: bursts(rate, every=seconds / 3, length=seconds / 10),
}
TRACES = tuple(_TRACES)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define the traffic and the engines.

    prefill: tokens per second of an engine. rate: mean requests per second. start: seconds to load
    an engine.
    """

    traces: tuple[str, ...] = TRACES
    prefill: float = 2000.0
    rate: float = 8.0
    seconds: float = 120.0
    start: float = 3.0
    prompt: int = 400
    output: int = 40
    interval: float = 1.0
    rounds: int = 1
    policy: RolePolicy = field(
        default_factory=lambda: RolePolicy(
            min=1,
            max=8,
            target=4.0,
            window=20.0,
            burst_window=4.0,
            scale_down_delay=20.0,
            cold_start=4.0,
        )
    )

    def traffic(self, trace: str, number: int) -> list[Arrival]:
        rate, most = _TRACES[trace](self.rate, self.seconds)
        lengths = (
            lognormal(self.prompt, 0.6, 4 * self.prompt),
            lognormal(self.output, 0.6, 4 * self.output),
        )
        return list(generate(rate, most, self.seconds, *lengths, seed=number))


QUICK = Plan(traces=("bursts",), rate=6.0, seconds=6.0, start=0.5, prompt=200, output=10)


@dataclass
class Figures:
    """Hold the compared figures; times in seconds."""

    ttft_p50: float
    ttft_p95: float
    tokens_per_second: float
    instance_seconds: float


@dataclass
class Pair:
    """Hold one trace, real and simulated.

    most: largest number of instances that the planner requested, real and simulated.
    """

    trace: str
    round: int
    requests: int
    failed: int
    cold_start: float
    real: Figures
    simulated: Figures
    most: tuple[int, int]


# ------------------------------------------------------------------------------------------------------------- reality
@dataclass
class Client:
    """Send the requests of a trace and record the times to their first tokens."""

    bus: Bus
    ttft: list[float] = field(default_factory=list)
    tokens: int = 0
    failed: int = 0

    async def ask(self, arrival: Arrival, start: float, rng: random.Random) -> None:
        """Send a request at its time; count it as failed if an error is raised."""
        prompt = [rng.randrange(FIRST_ID, FIRST_ID + WORDS) for _ in range(arrival.prompt)]
        await asyncio.sleep(start + arrival.at - monotonic())
        request = Complete(
            model=MODEL,
            prompt=prompt,
            max_tokens=arrival.output,
            sampling=Sampling(ignore_eos=True),
            stop=[],
        )
        try:
            await self._follow(
                self.bus.open("tokenizer", request, deadline=300.0), start + arrival.at
            )
        except MotetError:
            self.failed += 1

    async def _follow(self, stream: Stream, requested: float) -> None:
        first = 0.0
        async with stream:
            async for body in stream:
                if isinstance(body, Text):
                    first = first or monotonic()
        if stream.end is None or stream.end.usage is None or not first:
            self.failed += 1
            return
        self.ttft.append(first - requested)
        self.tokens += stream.end.usage.completion_tokens


async def run_all(plan: Plan) -> list[Pair]:
    """Run every trace through the stack, and simulate it with the cold start measured there."""
    pairs = []
    for number in range(plan.rounds):
        for trace in plan.traces:
            print(f"  round {number + 1}, {trace} ...", flush=True)
            pairs.append(await _compare(plan, trace, number))
    return pairs


async def _compare(plan: Plan, trace: str, number: int) -> Pair:
    traffic = plan.traffic(trace, number)
    async with _stack(plan) as (bus, spawner, cold_start, planner):
        await planner.start()
        try:
            await asyncio.sleep(_DISCOVERY_SECONDS)
            client, rng, start = Client(bus), random.Random(number), monotonic()
            async with asyncio.TaskGroup() as group:
                for arrival in traffic:
                    group.create_task(client.ask(arrival, start, rng))
            end = monotonic()
        finally:
            await planner.close()
            await planner.bus.close()
        real = Figures(
            quantile(client.ttft or [0.0], 0.5),
            quantile(client.ttft or [0.0], 0.95),
            client.tokens / (end - start),
            spawner.seconds(start, end),
        )
    outcome = simulated(plan, traffic, cold_start)
    found = Figures(
        quantile(outcome.ttft, 0.5),
        quantile(outcome.ttft, 0.95),
        outcome.output_tokens / outcome.span,
        outcome.instance_seconds,
    )
    most = spawner.most, max(outcome.replicas.most, plan.policy.min)
    return Pair(trace, number, len(traffic), client.failed, cold_start, real, found, most)


def simulated(plan: Plan, traffic: Sequence[Arrival], cold_start: float) -> SimulationOutcome:
    """Simulate the traffic.

    A token is sent at the end of a step, on average half a step after it is due.
    """
    step = 1 / STEPS
    speed = Speed(
        prefill_token=1 / plan.prefill,
        steps=[(1, step)],
        max_running=1024,
        prefill_share=0.0,
        overhead=step / 2,
    )
    begin = Scenario(
        speed=speed,
        policy=plan.policy,
        instances=plan.policy.min,
        interval=plan.interval,
        cold_start=cold_start,
        max_wait=120.0,
        lead=_DISCOVERY_SECONDS / 2,
    )
    return simulate(begin, traffic)


@contextlib.asynccontextmanager
async def _stack(plan: Plan) -> AsyncIterator[tuple[Bus, Spawner, float, Planner]]:
    """Start NATS, a tokenizer and one engine, and create a planner that is not started."""
    async with nats_stack() as (stack, nats):
        engine = ["--rate", str(STEPS), "--prefill", str(plan.prefill), "--start", str(plan.start)]
        spawner = Spawner(stack, engine)
        bus = await nats.bus("gateway")
        try:
            tokenizer = [
                "--model",
                str(save_checkpoint(stack.folder / MODEL)),
                "--decode-wait",
                "120s",
            ]
            await stack.start("motet_tokenizer", "tokenizer-0", *tokenizer)
            await bus.directory.wait_for(lambda directory: directory.ready("tokenizer"), 90.0)
            requested = monotonic()
            await spawner.scale("decode", plan.policy.min)
            await bus.directory.wait_for(lambda directory: directory.ready("decode"), 90.0)
            yield (
                bus,
                spawner,
                monotonic() - requested,
                await _planner(plan, nats, stack.folder, spawner),
            )
        finally:
            await bus.close()
            await spawner.stop()


async def _planner(plan: Plan, nats: NatsServer, folder: Path, spawner: Spawner) -> Planner:
    settings = (
        f"{name} = {getattr(plan.policy, name)}" for name in plan.policy.__dataclass_fields__
    )
    (folder / "roles.toml").write_text("[decode]\n" + "\n".join(settings) + "\n")
    config = nats.config(
        "planner", PlannerConfig, roles=folder / "roles.toml", interval=plan.interval
    )
    assert isinstance(config, PlannerConfig)
    return Planner(config, await nats.bus("planner"), spawner)


# -------------------------------------------------------------------------------------------------------------- telling
def report(pairs: Sequence[Pair]) -> str:
    rows = []
    for pair in pairs:
        for how, figures, most in (
            ("real", pair.real, pair.most[0]),
            ("simulated", pair.simulated, pair.most[1]),
        ):
            latencies = [f"{value * 1e3:,.0f}" for value in (figures.ttft_p50, figures.ttft_p95)]
            rates = [
                f"{figures.tokens_per_second:,.1f}",
                f"{figures.instance_seconds:,.0f}",
                str(most),
            ]
            rows.append([pair.trace, how, f"{pair.requests}", *latencies, *rates])
    header = [
        "trace",
        "how",
        "requests",
        "TTFT p50, ms",
        "p95, ms",
        "tokens/s",
        "instance seconds",
        "most",
    ]
    return "\n\n".join([table(header, rows), targets_table(targets(pairs))])


def targets(pairs: Sequence[Pair]) -> list[Target]:
    """Return how far real and simulated figures differ, by trace; the median of several rounds."""
    found = []
    for trace in dict.fromkeys(pair.trace for pair in pairs):
        for name in (each.name for each in fields(Figures)):
            of_trace = [pair for pair in pairs if pair.trace == trace]
            difference = [
                abs(getattr(p.simulated, name) / max(getattr(p.real, name), 1e-9) - 1)
                for p in of_trace
            ]
            what = f"{trace}: {name.replace('_', ' ')}, simulated / real - 1"
            found.append(Target(what, quantile(difference, 0.5), MAX_DIFFERENCE, "of it"))
    failed = sum(pair.failed for pair in pairs)
    return [*found, Target("requests that failed", failed, 0, "requests")]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "one short trace", RESULTS)
    parser.add_argument("--traces", nargs="+", choices=TRACES, help="those to run (default: all)")
    parser.add_argument(
        "--rounds", type=int, help="runs of each trace, with different seeds (default: 1)"
    )
    parser.add_argument("--seconds", type=float, help="seconds of each trace (default: 120)")
    parser.add_argument("--rate", type=float, help="requests per second (default: 8)")
    args = parser.parse_args(argv)
    plan, before = planned(args, Plan(), QUICK), conditions()
    pairs = asyncio.run(run_all(plan))
    print(f"{load_line(before)}\n\n{report(pairs)}", flush=True)
    write(args.file, before, plan, {"pairs": pairs}, targets(pairs))


if __name__ == "__main__":
    main()
