"""Measure disaggregated prefill: rates of KV transfer, ITL of streams, TTFT of long prompts.

`python benchmarks/run.py disaggregation --help`. The tables go to standard output, the numbers to
`results/disaggregation.json`.

Two engines of one core each serve the same load: either both decode (aggregated, the baseline), or
one of them prefills for the other (apart). Long prompts without cached prefixes arrive while
streams run. NATS and the engines are real processes; this one acts as their tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from benchmarks.stack.stack import nats_stack
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER, ROOT
from motet_llm.cache.kv_cache import KvCache, LayerShape
from motet_llm.disaggregation.kv_sender import KvSender
from motet_llm.disaggregation.kv_transfer import pack, plan_parts, unpack
from motet_shared.blobs.store import BlobStore
from motet_shared.messages import Generate, KvChunk, Prefill, Sampling
from motet_shared.quantiles import quantile
from motet_shared.wire.bus import Bus
from motet_shared.wire.discovery import Directory
from motet_tokenizer.router import PromptLoad, Router

RESULTS = RESULTS_FOLDER / "disaggregation.json"
ARRANGEMENTS = {"aggregated": ("decode", "decode"), "apart": ("decode", "prefill")}
READY = 90.0  # seconds
LEAST_SHM = 0.8  # of a plain copy
WAITED = 1e-3  # seconds without a part after which all earlier parts are read
MOST_WORSE = 1.03  # p95 of the time to first token of long prompts, apart / aggregated


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define lengths in tokens and times in seconds.

    every: interval between two long prompts. megabytes: size of a measured transfer.
    """

    model: str = str(ROOT / "models" / "pocket-chat")
    threads: int = 1
    streams: int = 4
    output: int = 400
    prompt: int = 1200
    prompts: int = 12
    every: float = 0.5
    rounds: int = 5
    megabytes: int = 32
    repeats: int = 15


QUICK = Plan(
    streams=1, output=400, prompt=100, prompts=1, every=0.1, rounds=1, megabytes=2, repeats=1
)


@dataclass
class Run:
    """Hold the results of one load.

    gaps: seconds between tokens of streams. ttft: seconds to first token of long prompts.
    handed_over: prompts that were computed remotely.
    """

    arrangement: str
    gaps: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    handed_over: int = 0


@dataclass
class Findings:
    """Hold all results.

    rates: GB/s by transport. alone: seconds to first token by policy. hidden: shares of a prompt's
    bytes that were read while it was computed.
    """

    rates: dict[str, float]
    runs: list[Run] = field(default_factory=list)
    alone: dict[str, list[float]] = field(default_factory=lambda: {"never": [], "always": []})
    hidden: list[float] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------------------- the way
async def transports(plan: Plan) -> dict[str, float]:
    """Return the median GB/s of a memory copy, of blobs, and of packing and unpacking KV blocks."""
    size = plan.megabytes << 20
    source, target = bytearray(size), bytearray(size)

    async def copy() -> None:
        memoryview(target)[:] = source

    ways: dict[str, Callable[[], Awaitable[object]]] = {"plain copy": copy}
    found: dict[str, list[float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        reader = await stack.enter_async_context(BlobStore("bench-reader"))
        for name, shared in (("shm", True), ("tcp", False)):
            owner = await stack.enter_async_context(
                BlobStore(f"bench-{name}", 2 * size, shared=shared)
            )
            ref = owner.put(source, digest=False, ttl=600.0)
            ways[name] = lambda ref=ref: reader.get(ref, target, release=False)  # type: ignore[misc]
            ways[f"{name}, into the store"] = lambda owner=owner: _put(owner, source)  # type: ignore[misc]
        for _ in range(plan.repeats + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                await way()
                found.setdefault(name, []).append(size / (time.perf_counter() - began) / 1e9)
    found |= _ends(size, plan.repeats)
    return {
        name: median(rates[1:]) for name, rates in found.items()
    }  # the first repeat maps memory


async def _put(owner: BlobStore, data: bytearray) -> None:
    owner.drop(owner.put(data, digest=False))


def _ends(size: int, repeats: int) -> dict[str, list[float]]:
    """Measure packing blocks of 16 tokens and unpacking them into blocks of 32, in parts."""
    tokens, shape = 1024, LayerShape(8, 64, 64)
    layers = max(1, size // (tokens * shape.nbytes(torch.bfloat16)))
    shapes = dict.fromkeys(range(layers), shape)
    ours, theirs = (KvCache(shapes, tokens // block, block, torch.bfloat16) for block in (16, 32))
    sender = KvSender(ours)
    found: dict[str, list[float]] = {"out of blocks": [], "into blocks": []}
    for _ in range(repeats + 1):
        spent = dict.fromkeys(found, 0.0)
        for part in plan_parts(ours, 0, tokens, sender.part_bytes):
            began = time.perf_counter()
            content = pack(ours, [range(ours.num_blocks)], part)
            packed = time.perf_counter()
            unpack(theirs, [range(theirs.num_blocks)], part, content, torch.bfloat16)
            spent["out of blocks"] += packed - began
            spent["into blocks"] += time.perf_counter() - packed
        for name, seconds in spent.items():
            found[name].append(size / seconds / 1e9)
    return found


# ------------------------------------------------------------------------------------------------------------ the loads
class Client:
    """Send requests to engines as a tokenizer does."""

    def __init__(self, bus: Bus, plan: Plan, vocab: int, chance: random.Random):
        self._bus, self._plan, self._vocab, self._chance = bus, plan, vocab, chance
        self._router = Router(bus.directory)

    async def ask(self, prompt: int, output: int) -> list[float]:
        """Generate from a random prompt; return the times of the request and of each token."""
        return (await self.ask_and_tell(prompt, output))[0]

    async def ask_and_tell(self, prompt: int, output: int) -> tuple[list[float], bool]:
        """Generate from a random prompt; return the times, and True for remote prefill."""
        model = Path(self._plan.model).name
        ids = [self._chance.randrange(self._vocab) for _ in range(prompt)]
        sampling = Sampling(temperature=0, max_tokens=output, ignore_eos=True)
        times = [time.perf_counter()]
        instance = self._router.pick(model, load=PromptLoad(ids))
        async with self._bus.open(
            "decode", Generate(model=model, prompt=ids, sampling=sampling), instance=instance
        ) as s:
            async for batch in s.batches():
                times += [time.perf_counter()] * len(batch)
        return times, s.end is not None and "decode.transfer" in s.end.timing


async def measure(plan: Plan, arrangement: str, number: int, policy: str = "auto") -> Run:
    """Run streams and, meanwhile, long prompts on an arrangement."""
    run = Run(arrangement)
    async with _engines(plan, ARRANGEMENTS[arrangement], policy) as bus:
        cards = [card for beat in bus.directory.ready("decode") for card in beat.models]
        client = Client(
            bus, plan, min(card.vocab_size for card in cards) - 8, random.Random(number)
        )
        for _ in range(
            2 * len(ARRANGEMENTS[arrangement])
        ):  # until every engine has measured its speed
            await client.ask(plan.prompt, 4)
        streams = [asyncio.create_task(client.ask(8, plan.output)) for _ in range(plan.streams)]
        await asyncio.sleep(plan.every)
        prompts = []
        began = time.perf_counter()
        for _ in range(plan.prompts):
            prompts.append(asyncio.create_task(_first(client, plan.prompt, run)))
            await asyncio.sleep(plan.every)
        await asyncio.gather(*prompts)
        ended = time.perf_counter()
        for times in await asyncio.gather(*streams):
            run.gaps += [
                after - before for before, after in pairwise(times[1:]) if began <= before <= ended
            ]
    return run


async def _first(client: Client, prompt: int, run: Run) -> None:
    times, handed_over = await client.ask_and_tell(prompt, 1)
    run.ttft.append(times[1] - times[0])
    run.handed_over += handed_over


async def alone(plan: Plan, policy: str, number: int) -> list[float]:
    """Return seconds to the first token of long prompts that run one after the other."""
    async with _engines(plan, ARRANGEMENTS["apart"], policy) as bus:
        cards = [card for beat in bus.directory.ready("decode") for card in beat.models]
        client = Client(
            bus, plan, min(card.vocab_size for card in cards) - 8, random.Random(number)
        )
        await client.ask(plan.prompt, 1)
        found = []
        for _ in range(plan.prompts):
            times = await client.ask(plan.prompt, 1)
            found.append(times[1] - times[0])
    return found


async def hidden(plan: Plan, number: int) -> list[float]:
    """Return the share of KV bytes read during prefill, for each remotely computed prompt."""
    chance, found = random.Random(number), []
    async with (
        _engines(plan, ["prefill"], "never", "decode") as bus,
        BlobStore("bench-reader") as reader,
    ):
        [(instance, card)] = [
            (beat.instance, card) for beat in bus.directory.ready("prefill") for card in beat.models
        ]
        for _ in range(plan.prompts):
            prompt = [chance.randrange(card.vocab_size - 8) for _ in range(plan.prompt)]
            request = Prefill(model=card.name, prompt=prompt, kv_format=card.kv_format)
            found.append(await _read_meanwhile(bus, reader, request, instance))
    return found


async def _read_meanwhile(bus: Bus, reader: BlobStore, request: Prefill, instance: str) -> float:
    meanwhile, total, chunk, idle = 0, 0, 0, time.perf_counter()
    async with bus.open("prefill", request, instance=instance) as stream:
        async for piece in stream:
            assert isinstance(piece, KvChunk)
            if piece.stop > chunk and time.perf_counter() - idle > WAITED:
                meanwhile = total  # all earlier chunks were read before this one was computed
            chunk = piece.stop
            await reader.get(piece.ref)
            total, idle = total + piece.ref.nbytes, time.perf_counter()
            if piece.last and chunk == len(request.prompt):
                await stream.end_input()
    return meanwhile / total


@contextlib.asynccontextmanager
async def _engines(
    plan: Plan, roles: Sequence[str], policy: str, ours: str = "tokenizer"
) -> AsyncIterator[Bus]:
    """Start workers of these roles; yield a bus of the role `ours` once all are ready."""
    async with nats_stack(OMP_NUM_THREADS=str(plan.threads)) as (stack, nats):
        common = ["--model", plan.model, "--threads", str(plan.threads)]
        bus = await nats.bus(ours)
        try:
            for number, role in enumerate(roles):
                flags = ["--role", role, "--remote-prefill", policy, *common]
                await stack.start("motet_llm", f"{role}-{number}", *flags)
            await bus.directory.wait_for(lambda known: _all_ready(known, roles), READY)
            await asyncio.sleep(1.0)  # until they have each other's heartbeats
            yield bus
        finally:
            await bus.close()


def _all_ready(known: Directory, roles: Sequence[str]) -> bool:
    return all(len(known.ready(role)) == roles.count(role) for role in roles)


# -------------------------------------------------------------------------------------------------------------- telling
def targets(rates: dict[str, float], runs: Sequence[Run]) -> list[Target]:
    ttft = {name: quantile(_all(runs, name, "ttft"), 0.95) for name in ARRANGEMENTS}
    worse = ttft["apart"] / ttft["aggregated"]
    return [
        Target(
            "shared memory, of a plain copy",
            rates["shm"] / rates["plain copy"],
            LEAST_SHM,
            "",
            most=False,
        ),
        Target("p95 TTFT of long prompts, apart / aggregated", worse, MOST_WORSE, ""),
    ]


def _all(runs: Sequence[Run], arrangement: str, what: str) -> list[float]:
    return [value for run in runs if run.arrangement == arrangement for value in getattr(run, what)]


def report(found: Findings, plan: Plan) -> str:
    rates, runs, ways = found.rates, found.runs, found.alone
    copy = rates["plain copy"]
    transfer = table(
        ["way", "", "GB/s", "of a plain copy"],
        [[name, "", f"{rate:.2f}", f"{rate / copy:.0%}"] for name, rate in rates.items()],
    )
    rows = []
    for name in ARRANGEMENTS:
        gaps, ttft = _all(runs, name, "gaps"), _all(runs, name, "ttft")
        wanted = ((gaps, 0.5), (gaps, 0.99), (ttft, 0.5), (ttft, 0.95))
        figures = [
            quantile(values, share) if values else math.nan for values, share in wanted
        ]  # streams may have ended
        handed = sum(run.handed_over for run in runs if run.arrangement == name)
        rows.append(
            [name, f"{handed} of {len(ttft)}", *(f"{seconds * 1e3:,.1f}" for seconds in figures)]
        )
    heads = [
        "two engines",
        "handed over",
        "ITL p50, ms",
        "ITL p99, ms",
        "TTFT p50, ms",
        "TTFT p95, ms",
    ]
    here, there = (median(ways[policy]) for policy in ("never", "always"))
    extra = (
        f"A prompt of {plan.prompt} tokens with nothing beside it: {here * 1e3:,.1f} ms to the first token where it"
        f" is decoded, {there * 1e3:,.1f} ms if it is computed elsewhere ({there - here:+.4f} s)."
        f" Of its keys and values {median(found.hidden):.0%} were read while the rest was being computed."
    )
    return "\n\n".join([transfer, table(heads, rows), extra, targets_table(targets(rates, runs))])


async def measure_all(plan: Plan) -> Findings:
    found = Findings(await transports(plan), hidden=await hidden(plan, 0))
    for number in range(plan.rounds):
        for policy, times in found.alone.items():
            times += await alone(plan, policy, number)
        for arrangement in ARRANGEMENTS:
            found.runs.append(await measure(plan, arrangement, number))
            print(f"  round {number + 1} of {plan.rounds}: {arrangement}", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "a prompt or two", RESULTS)
    parser.add_argument("--model", help="checkpoint folder (default: pocket-chat)")
    parser.add_argument("--prompt", type=int, help="tokens of a long prompt (default: 1200)")
    parser.add_argument("--streams", type=int, help="streams during the long prompts (default: 4)")
    parser.add_argument("--rounds", type=int, help="rounds of every arrangement (default: 5)")
    args = parser.parse_args(argv)
    plan, before = planned(args, Plan(), QUICK), conditions()
    found = asyncio.run(measure_all(plan))
    print(f"{load_line(before)}\n\n{report(found, plan)}", flush=True)
    write(args.file, before, plan, found, targets(found.rates, found.runs))


if __name__ == "__main__":
    main()
