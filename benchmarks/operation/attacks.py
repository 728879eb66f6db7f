"""Measure the latency of one tenant's short chats while another tenant attacks.

`python benchmarks/run.py attacks --help`. NATS, gateway, tokenizer, engine, encoder, VAD and ASR run as
processes with the bundled models. A quiet tenant sends chats of four tokens, alone and during each
kind of attack (`attack_client`), in turn. The attacker's key has cautious limits. The numbers go
to `results/attacks.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter

import httpx

from benchmarks.operation.attack_client import ATTACKS
from benchmarks.stack.stack import STOP_SECONDS, Stack, environment, nats_stack
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER, ROOT
from motet_shared.quantiles import quantile
from motet_shared.tenants import digest, new_key

RESULTS = RESULTS_FOLDER / "attacks.json"
QUIET, ATTACKER = "quiet", "attacker"
LIMITS = {QUIET: "", ATTACKER: "tokens_per_minute = 1000\nmax_context = 256\n"}
LIMIT = 3.0  # p95 during an attack over p95 alone


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how much is measured."""

    kinds: tuple[str, ...] = tuple(ATTACKS)
    rounds: int = 2
    requests: int = 40  # of the quiet tenant, alone and during each attack, per round
    pause: float = 0.1  # seconds between them
    settle: float = 2.0  # seconds from the start of an attack to the first request
    sees: bool = True  # whether encoder, VAD and ASR run


QUICK = Plan(kinds=("newlines", "foreign-host"), rounds=1, requests=3, settle=0.5, sees=False)


@dataclass
class Findings:
    """Hold seconds of the quiet tenant's chats by attack, and the attacker's replies by status."""

    alone: list[float] = field(default_factory=list)
    beside: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    replies: dict[str, dict[str, int]] = field(default_factory=dict)

    def ratio(self, kind: str) -> float:
        """Return p95 during the attack over p95 alone; infinite if a chat failed."""
        if self.failed.get(kind):
            return float("inf")
        return quantile(self.beside[kind], 0.95) / quantile(self.alone, 0.95)


@contextlib.asynccontextmanager
async def stack_under_attack(plan: Plan) -> AsyncIterator[Stack]:
    """Yield a ready stack; each tenant's key is in the file of its name in the stack's folder."""
    async with nats_stack(OMP_NUM_THREADS="1") as (stack, _):
        tenants = str(_tenants(stack.folder))
        chat = str(ROOT / "models" / "pocket-chat")
        services = {
            "motet_llm": ("decode", ["--model", chat, "--threads", "1"]),
            "motet_tokenizer": ("tokenizer", ["--model", chat]),
        }
        if plan.sees:
            services |= {
                "motet_encoder": ("encoder", ["--model", chat]),
                "motet_vad": ("vad", []),
                "motet_asr": ("asr", ["--model", str(ROOT / "models" / "pocket-asr")]),
            }
        gateway = ["--port", str(stack.port), "--tenants-file", tenants]
        await stack.serve(services | {"motet_gateway": ("gateway", gateway)})
        yield stack


def _tenants(folder: Path) -> Path:
    """Write the tenants file, and a file with each tenant's key; return the path of the former."""
    text = ""
    for tenant, limits in LIMITS.items():
        key = new_key()
        (folder / tenant).write_text(key)
        text += f"[tenants.{tenant}]\n{limits}"
    for tenant in LIMITS:
        text += (
            f'[[keys]]\ntenant = "{tenant}"\nsha256 = "{digest((folder / tenant).read_text())}"\n'
        )
    file = folder / "tenants.toml"
    file.write_text(text)
    return file


async def chat_times(stack: Stack, plan: Plan) -> tuple[list[float], int]:
    """Return the seconds of each completed four-token chat, and the number of failed ones."""
    times: list[float] = []
    failed = 0
    headers = {"authorization": f"Bearer {(stack.folder / QUIET).read_text()}"}
    body = {
        "model": "pocket-chat",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
    }
    base = f"http://127.0.0.1:{stack.port}"
    async with httpx.AsyncClient(
        base_url=base, headers=headers, timeout=30, trust_env=False
    ) as http:
        for _ in range(plan.requests):
            began = perf_counter()
            try:
                ok = (await http.post("/v1/chat/completions", json=body)).status_code == 200
            except httpx.HTTPError:
                ok = False
            if ok:
                times.append(perf_counter() - began)
            failed += not ok
            await asyncio.sleep(plan.pause)
    return times, failed


@contextlib.asynccontextmanager
async def attacking(
    stack: Stack, kind: str, settle: float, replies: dict[str, int]
) -> AsyncIterator[None]:
    """Run the attack within the context; add the attacker's replies by status to `replies`."""
    argv = [
        sys.executable,
        "-m",
        "benchmarks.operation.attack_client",
        kind,
        str(stack.port),
        str(stack.folder / ATTACKER),
    ]
    process = await asyncio.create_subprocess_exec(
        *argv, env=environment(), stdout=asyncio.subprocess.PIPE
    )
    try:
        await asyncio.sleep(settle)
        yield
        if process.returncode is not None:
            raise RuntimeError(f"the attack {kind!r} ended by itself with {process.returncode}")
        process.terminate()
        out, _ = await asyncio.wait_for(process.communicate(), STOP_SECONDS)
        for status, count in json.loads(out).items():
            replies[status] = replies.get(status, 0) + count
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def measured(plan: Plan) -> Findings:
    """Measure alone and during every attack, in turn."""
    found = Findings()
    async with stack_under_attack(plan) as stack:
        await chat_times(stack, plan)  # warm-up
        for number in range(plan.rounds):
            for kind in plan.kinds:
                found.alone += (await chat_times(stack, plan))[0]
                async with attacking(stack, kind, plan.settle, found.replies.setdefault(kind, {})):
                    times, failed = await chat_times(stack, plan)
                found.beside.setdefault(kind, []).extend(times)
                found.failed[kind] = found.failed.get(kind, 0) + failed
                print(f"  round {number + 1}, {kind}: {found.ratio(kind):.2f} times", flush=True)
    return found


def run(plan: Plan, output: Path) -> Findings:
    """Measure, print the table, and write the JSON file."""
    before = conditions()
    found = asyncio.run(measured(plan))
    rows = [
        [
            "alone",
            "",
            f"{quantile(found.alone, 0.5) * 1e3:.1f}",
            f"{quantile(found.alone, 0.95) * 1e3:.1f}",
            "",
        ]
    ]
    for kind in plan.kinds:
        replies = ", ".join(
            f"{status}: {count}" for status, count in sorted(found.replies[kind].items())
        )
        middle, high = (
            f"{quantile(found.beside[kind] or [0.0], q) * 1e3:.1f}" for q in (0.5, 0.95)
        )
        rows.append([kind, replies, middle, high, f"{found.ratio(kind):.2f}"])
    targets = [
        Target(f"p95 beside {kind} / alone", found.ratio(kind), LIMIT, "times")
        for kind in plan.kinds
    ]
    print(f"\n{load_line(before)}, {os.cpu_count()} processors\n")
    print(table(["attack", "its replies", "p50, ms", "p95, ms", "p95 / alone"], rows))
    print(f"\n{targets_table(targets)}")
    write(output, before, plan, asdict(found), targets)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(
        "What a short chat pays while another tenant attacks.",
        "two attacks",
        RESULTS,
        prog="attacks",
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=list(ATTACKS), help="attacks to run (default: all)"
    )
    parser.add_argument(
        "--rounds", type=int, help=f"rounds of all attacks (default: {Plan.rounds})"
    )
    parser.add_argument(
        "--requests",
        type=int,
        help=f"requests of the quiet tenant per measurement (default: {Plan.requests})",
    )
    args = parser.parse_args(argv)
    run(planned(args, Plan(), QUICK), args.file)


if __name__ == "__main__":
    main()
