"""Measure whether a stack that works for an hour gets slower or larger.

`python benchmarks/run.py soak --help`. `motet up` with the bundled models and small caches serves a mixture of
chats, chats about pictures, speech, transcripts, pictures, embeddings and spoken turns over WebSockets. First a
fixed number of clients ask one thing after another, which gives the requests per second of full load; then
requests come at half that rate, at random (Poisson), whether those before have been answered or not. A request's
latency runs from when it was due to the end of its answer, divided by the first median of its kind; the first and
the last sixth of the time are compared, and slopes of latency and memory are fitted over minutes. The numbers go
to `results/soak.json`.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import statistics
import sys
import wave
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Any

import httpx
import websockets

from benchmarks.omni.camera import CATEGORIES, asked_scene, frame_of
from benchmarks.stack.up import Up, motet_up
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.endurance import LATENCY_HEADER, Endurance
from benchmarks.support.measures import Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER
from motet_shared.quantiles import quantile
from recipes.world.scenes import describe  # behind the path that camera adds

RESULTS = RESULTS_FOLDER / "soak.json"
CHAT, EARS, VOICE, BRUSH, VECTORS = (
    f"pocket-{name}" for name in ("chat", "asr", "tts", "draw", "embed")
)
SPEAKERS = ("ada", "ben", "clara", "david")
REPLY_SECONDS = 60.0
WARM_REQUESTS = 4  # of each kind, before anything is measured
_RECORDINGS = 8  # that the stack's own voice makes beforehand
_WARNINGS = 40  # of the stack's log that are kept
_RATE = 24_000  # Hz
_FAILURES = (httpx.HTTPError, OSError, ValueError, LookupError, websockets.WebSocketException)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how long it lasts.

    clients: that find full load. share: of full load that is asked for. caches: memory for keys and values, and for
    embeddings of pictures; full in minutes, so that what grows is no cache.
    """

    minutes: float = 60.0
    clients: int = 8
    full_seconds: float = 60.0
    share: float = 0.5
    caches: str = "16MiB"
    seed: int = 0


QUICK = Plan(minutes=0.3, clients=2, full_seconds=4.0)


@dataclass
class Findings(Endurance):
    """Hold besides full load in requests per second, and of each request its kind and what failed.

    `latencies` are relative: `seconds` by the median of their kind in the first sixth of the time.
    """

    full: float = 0.0
    kinds: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)  # the last of the stack's log

    def compare(self, total: float) -> None:
        """Compute `latencies` from `seconds`, of a run of `total` minutes."""
        of = {kind: self._typical(kind, total) for kind in set(self.kinds)}
        self.latencies = [
            seconds / of[kind] for kind, seconds in zip(self.kinds, self.seconds, strict=True)
        ]

    def _typical(self, kind: str, total: float) -> float:
        of = self.of(kind)
        first, _ = of.ends(total)
        return statistics.median(first or of.latencies)

    def of(self, kind: str) -> Endurance:
        """Return the times and seconds of the requests of one kind."""
        found = Endurance()
        for minute, one, seconds in zip(self.minutes, self.kinds, self.seconds, strict=True):
            if one == kind:
                found.minutes.append(minute)
                found.latencies.append(seconds)
        return found


class Clients:
    """Ask for what people ask for. Each request differs from those before, as far as chance has it."""

    def __init__(self, url: str, http: httpx.AsyncClient, seed: int):
        self._url, self._http = url, http
        self._rng, self._seeds = Random(seed), itertools.count()
        self._recordings: list[bytes] = []

    async def record(self) -> None:
        """Let the stack speak what it is to listen to later."""
        for _ in range(_RECORDINGS):
            self._recordings.append(await self.speech())

    async def ask(self, kind: str) -> None:
        """Send a request of a kind and read its answer. Raises for an error and for an empty answer."""
        async with asyncio.timeout(REPLY_SECONDS):
            if not await KINDS[kind][0](self):
                raise ValueError("the answer is empty")

    def kind(self) -> str:
        """Return a kind, each as often as its share says."""
        (found,) = self._rng.choices(list(KINDS), [share for _, share in KINDS.values()])
        return found

    def arrival(self, rate: float) -> float:
        """Return the seconds until the next request."""
        return self._rng.expovariate(rate)

    async def _post(self, path: str, **body: Any) -> httpx.Response:
        reply = await self._http.post(path, **body)
        return reply.raise_for_status()

    async def chat(self) -> str:
        scene, question = asked_scene(CATEGORIES, self._rng)
        return await self._streamed(f"{describe(scene, self._rng)} {question.text}")

    async def seeing(self) -> str:
        scene, question = asked_scene(CATEGORIES, self._rng)
        url = f"data:image/png;base64,{frame_of(scene, self._rng)}"
        return await self._streamed(
            [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": question.text},
            ]
        )

    async def _streamed(self, content: Any) -> str:
        body = {
            "model": CHAT,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 48,
            "stream": True,
        }
        text = ""
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[len("data: ") :])
                    if "error" in event:
                        raise ValueError(event["error"]["code"])
                    text += event["choices"][0]["delta"].get("content") or ""
        return text

    def _scene(self) -> str:
        scene, _ = asked_scene(CATEGORIES, self._rng)
        return describe(scene, self._rng)

    async def speech(self) -> bytes:
        body = {
            "model": VOICE,
            "input": self._scene(),
            "voice": self._rng.choice(SPEAKERS),
            "response_format": "pcm",
        }
        return (await self._post("/v1/audio/speech", json=body)).content

    async def transcript(self) -> str:
        sound = self._rng.choice(self._recordings)
        files = {"file": ("said.wav", _wav(sound))}
        reply = await self._post("/v1/audio/transcriptions", data={"model": EARS}, files=files)
        return str(reply.json()["text"])

    async def picture(self) -> str:
        body = {"model": BRUSH, "prompt": self._scene(), "size": "64x64"}
        reply = await self._post("/v1/images/generations", json={**body, "seed": next(self._seeds)})
        return str(reply.json()["data"][0]["b64_json"])

    async def embedding(self) -> list[float]:
        body = {"model": VECTORS, "input": [self._scene() for _ in range(4)]}
        found: list[float] = (await self._post("/v1/embeddings", json=body)).json()["data"][0][
            "embedding"
        ]
        return found

    async def spoken(self) -> str:
        """Ask something aloud over a WebSocket and listen to the answer."""
        url = f"{self._url.replace('http', 'ws', 1)}/v1/realtime?model={CHAT}"
        async with websockets.connect(url, proxy=None, max_size=None) as socket:
            session = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
            for event in (
                {"type": "session.update", "session": session},
                *_appended(self._rng.choice(self._recordings)),
                {"type": "input_audio_buffer.commit"},
                {"type": "response.create"},
            ):
                await socket.send(json.dumps(event))
            async for message in socket:
                event = json.loads(message)
                if event["type"] == "error":
                    raise ValueError(event["error"]["code"])
                if event["type"] == "response.done":
                    if event["response"]["status"] != "completed":
                        raise ValueError(f"the reply is {event['response']['status']}")
                    return str(event["response"]["output"][0]["content"][0]["transcript"])
        return ""


Ask = Callable[[Clients], Awaitable[Any]]
# Each with its share of the requests.
KINDS: dict[str, tuple[Ask, int]] = {
    "chat": (Clients.chat, 6),
    "seeing": (Clients.seeing, 4),
    "speech": (Clients.speech, 2),
    "transcript": (Clients.transcript, 2),
    "picture": (Clients.picture, 1),
    "embedding": (Clients.embedding, 4),
    "spoken": (Clients.spoken, 1),
}


def _wav(sound: bytes) -> bytes:
    """Return 16-bit samples of one channel as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, _RATE, 0, "NONE", ""))
        out.writeframes(sound)
    return file.getvalue()


def _appended(sound: bytes, piece: int = 9600) -> list[dict[str, Any]]:
    return [
        {
            "type": "input_audio_buffer.append",
            "audio": base64.b64encode(sound[start : start + piece]).decode(),
        }
        for start in range(0, len(sound), piece)
    ]


# ------------------------------------------------------------------------------------------------------------ measuring
async def measure(plan: Plan) -> Findings:
    findings = Findings()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    async with (
        motet_up(MOTET_KV_MEMORY=plan.caches, MOTET_CACHE_MEMORY=plan.caches) as up,
        httpx.AsyncClient(
            base_url=up.url, timeout=REPLY_SECONDS, trust_env=False, limits=limits
        ) as http,
    ):
        await up.until({"gateway": 1})
        await up.until_ready()
        clients = Clients(up.url, http, plan.seed)
        await clients.record()
        for kind in KINDS:
            for _ in range(WARM_REQUESTS):
                await clients.ask(kind)
        findings.full = await _full_load(clients, plan)
        names = await up.names()
        watching = asyncio.create_task(findings.watch_memory(lambda: _memory(up, names)))
        try:
            await _half_load(clients, plan, findings)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    findings.warnings = up.warnings()[-_WARNINGS:]
    findings.compare(plan.minutes)
    return findings


async def _full_load(clients: Clients, plan: Plan) -> float:
    """Return the requests per second of clients that ask one thing after another."""
    ends, answered = monotonic() + plan.full_seconds, 0

    async def client() -> None:
        nonlocal answered
        while monotonic() < ends:
            await clients.ask(clients.kind())
            answered += monotonic() < ends

    await asyncio.gather(*(client() for _ in range(plan.clients)))
    return answered / plan.full_seconds


async def _half_load(clients: Clients, plan: Plan, findings: Findings) -> None:
    start = due = monotonic()

    async def one(kind: str, due: float) -> None:
        try:
            await clients.ask(kind)
        except _FAILURES as error:
            what = f"{kind}: {error or type(error).__name__}"[:300]
            findings.failures[what] = findings.failures.get(what, 0) + 1
            return
        findings.minutes.append((due - start) / 60)
        findings.kinds.append(kind)
        findings.seconds.append(monotonic() - due)

    async with asyncio.TaskGroup() as tasks:
        while True:
            due += clients.arrival(plan.share * findings.full)
            if due - start > plan.minutes * 60:
                break
            await asyncio.sleep(max(0.0, due - monotonic()))
            tasks.create_task(one(clients.kind(), due))


def _memory(up: Up, names: dict[int, str]) -> dict[str, float]:
    """Return MiB by name of process that no file has, shared memory divided among those that share it."""
    found: dict[str, float] = {}
    for one in up.processes(names):
        size = (one.anonymous + one.shared) / (1 << 20)
        found[one.name] = found.get(one.name, 0.0) + size
    return found


# -------------------------------------------------------------------------------------------------------------- telling
def targets(findings: Findings, plan: Plan) -> list[Target]:
    """Return the targets that this run can judge."""
    failed = Target("requests that failed", sum(findings.failures.values()), 0, "")
    return [failed, *findings.targets(plan.minutes, "request by its kind's median")]


def report(findings: Findings, plan: Plan) -> str:
    total = plan.minutes
    rows = []
    for kind in KINDS:
        of = findings.of(kind)
        if all(of.ends(total)):
            rows += [of.latency_row(share, total, kind) for share in (0.5, 0.99)]
    relative = [
        f"p{100 * share:.0f} {quantile(findings.latencies, share):.2f}"
        for share in (0.5, 0.9, 0.99)
    ]
    failures = "".join(f"\nFAILED {what} ({count})" for what, count in findings.failures.items())
    failures += "".join(f"\n    {line}" for line in findings.warnings)
    return "\n\n".join(
        [
            f"Full load {findings.full:.2f} requests/s; then {len(findings.seconds)} requests in "
            f"{total:g} minutes, latencies by the first median of their kind {', '.join(relative)}.{failures}",
            table(LATENCY_HEADER, rows),
            findings.memory_table(total),
            targets_table(targets(findings, plan)),
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "eighteen seconds", RESULTS, "soak")
    parser.add_argument("--minutes", type=float, help="of half load (default: 60)")
    parser.add_argument("--share", type=float, help="of full load (default: 0.5)")
    parser.add_argument("--caches", metavar="MEMORY", help="of each cache (default: 16MiB)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    args = parser.parse_args(argv)
    plan, before = planned(args, Plan(), QUICK), conditions()
    findings = asyncio.run(measure(plan))
    found = targets(findings, plan)
    print(f"{load_line(before)}\n\n{report(findings, plan)}", flush=True)
    write(args.file, before, plan, findings, found)
    if args.check and not all(target.met for target in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
