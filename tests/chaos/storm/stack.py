"""Two processes of every service on a nats-server, each with a way to it of its own; what dies is started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from e2e import markov
from motet_shared.testing import NatsServer, free_port
from motet_shared.wire.bus import Bus
from motet_shared.wire.discovery import Directory
from support.checkpoints import tts_checkpoints
from support.checkpoints.asr_checkpoints import tiny_whisper
from support.checkpoints.diffusion_checkpoints import stable_diffusion
from support.running.fork_server import ForkServer, alive
from support.stages import diffusion_stage

CHAT, ASR_MODEL, VOICE, BRUSH = "markov", "ears", "voice", diffusion_stage.MODEL
ROLES = ("gateway", "tokenizer", "decode", "vad", "asr", "tts", "diffusion")
NATS = "nats"
TWO = 2  # of each
_READY = 240.0  # seconds
_LIGHT = ("motet_gateway.service", "motet_tokenizer.service", "transformers.models.llama")
_LOADED = (
    "motet_llm.service",
    "motet_vad.service",
    "motet_asr.service",
    "motet_tts.service",
    *diffusion_stage.LOADED,
    "transformers.models.whisper.modeling_whisper",
    "transformers.models.pocket_tts.modeling_pocket_tts",
    "transformers.models.llama.modeling_llama",
)


class Line:
    """A process' own way to NATS, which can be cut. It looks like the server to whoever starts that process."""

    def __init__(self, nats: NatsServer):
        self.credentials = nats.credentials
        self._nats = nats
        self._ends: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.sleep(0)

    def cut(self) -> None:
        """Every connection breaks off; new ones may be made at once."""
        for end in list(self._ends):
            end.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._nats.port)
        except OSError:
            writer.transport.abort()
            return
        self._ends |= {writer, back}
        ways = [asyncio.create_task(_pump(reader, back)), asyncio.create_task(_pump(there, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, back):
                end.transport.abort()
                self._ends.discard(end)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


@dataclass
class Member:
    """A process of the stack. `died`: how often it ended, ready, and nobody had killed it."""

    name: str
    role: str
    argv: tuple[str, ...]
    line: Line
    forks: ForkServer
    pid: int = 0
    died: int = 0
    starts: int = 0


@dataclass
class StormStack:
    """`urls` are those of the gateways. `bus` looks, as an operator does."""

    nats: NatsServer
    bus: Bus
    members: list[Member]
    urls: list[str]
    _killed: set[int] = field(default_factory=set)

    def member(self, name: str) -> Member:
        return next(member for member in self.members if member.name == name)

    async def start(self, member: Member) -> None:
        member.pid = await member.forks.start(member.line, *member.argv)
        member.starts += 1

    async def supervise(self) -> None:
        """Start again what has ended, until cancelled. What starts while NATS is away may have to be started twice."""
        were_ready: set[int] = set()
        while True:
            were_ready |= self._ready_pids(self.bus.directory)
            for member in self.members:
                if not alive(member.pid):
                    member.died += member.pid in were_ready - self._killed
                    await self.start(member)
            await asyncio.sleep(0.05)

    async def all_ready(self, seconds: float = _READY) -> None:
        """Every process takes work. TimeoutError names those that do not."""

        def ready(directory: Directory) -> bool:
            return not self.unready(directory)

        try:
            await self.bus.directory.wait_for(ready, seconds)
        except TimeoutError:
            missing = ", ".join(self.unready(self.bus.directory))
            raise TimeoutError(f"not ready within {seconds:g} s: {missing}") from None

    def unready(self, directory: Directory) -> list[str]:
        return [
            member.name for member in self.members if member.pid not in self._ready_pids(directory)
        ]

    @staticmethod
    def _ready_pids(directory: Directory) -> set[int]:
        return {beat.pid for role in ROLES for beat in directory.ready(role)}

    def instances(self) -> dict[str, str]:
        """Instance id by the name of each process that has beaten."""
        beats = {
            beat.pid: beat.instance for role in ROLES for beat in self.bus.directory.instances(role)
        }
        return {member.name: beats[member.pid] for member in self.members if member.pid in beats}

    # ---------------------------------------------------------------------------------------------------------- blows
    async def kill(self, name: str) -> None:
        """SIGKILL. NATS comes back on its port, everything else as another process."""
        if name == NATS:
            await self.nats.kill()
            await self.nats.start()
            return
        pid = self.member(name).pid
        self._killed.add(pid)
        with contextlib.suppress(
            ProcessLookupError
        ):  # it has just ended by itself: the supervisor knows
            os.kill(pid, signal.SIGKILL)

    async def pause(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        pid = self.nats.pid if name == NATS else self.member(name).pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds)
            finally:
                os.kill(pid, signal.SIGCONT)

    async def cut(self, name: str) -> None:
        """It loses its connections to NATS; NATS loses all of them."""
        for member in self.members:
            if name in (NATS, member.name):
                member.line.cut()


def _arguments(folder: Path, ports: list[int]) -> dict[str, list[tuple[str, ...]]]:
    """Module and flags of each process, by role."""
    chat, brush = markov.save(folder / CHAT), stable_diffusion(folder / BRUSH)
    ears, voice = (
        tiny_whisper(folder / ASR_MODEL),
        tts_checkpoints.pocket_tts(folder / VOICE, threshold=1.0),
    )
    one: dict[str, tuple[str, ...]] = {
        "tokenizer": ("motet_tokenizer", "--model", f"{CHAT}={chat}"),
        "decode": ("motet_llm", "--model", str(chat), "--name", CHAT, "--threads", "1"),
        "vad": ("motet_vad",),
        "asr": (
            "motet_asr",
            "--model",
            str(ears),
            "--name",
            ASR_MODEL,
            "--no-fallback",
            "--no-live",
            "--parallel",
            "1",
        ),
        # One sentence at a time: what is computed together is rounded together, and a sound must come out to the bit.
        "tts": (
            "motet_tts",
            "--model",
            str(voice),
            "--name",
            VOICE,
            "--greedy",
            "--max-running",
            "1",
            "--threads",
            "1",
        ),
        "diffusion": ("motet_diffusion", *diffusion_stage.flags(brush)),
    }
    gateways: list[tuple[str, ...]] = [
        ("motet_gateway", "--port", str(port), "--patience", "10") for port in ports
    ]
    return {"gateway": gateways} | {role: [argv] * TWO for role, argv in one.items()}


@asynccontextmanager
async def storm_stack(folder: Path) -> AsyncIterator[StormStack]:
    """All of it ready."""
    ports = [free_port() for _ in range(TWO)]
    arguments = await asyncio.to_thread(_arguments, folder, ports)
    async with NatsServer() as nats, AsyncExitStack() as exits:
        light = await exits.enter_async_context(ForkServer(*_LIGHT, lacking=("torch",)))
        heavy = await exits.enter_async_context(ForkServer(*_LOADED))
        bus = await nats.bus("operator")
        exits.push_async_callback(bus.close)
        members = []
        for role in ROLES:
            for number, argv in enumerate(arguments[role], start=1):
                line = Line(nats)
                await line.open()
                exits.push_async_callback(line.close)
                forks = light if role in ("gateway", "tokenizer") else heavy
                members.append(Member(f"{role}-{number}", role, argv, line, forks))
        stack = StormStack(nats, bus, members, [f"http://127.0.0.1:{port}" for port in ports])
        for member in members:
            await stack.start(member)
        await stack.all_ready()
        yield stack
