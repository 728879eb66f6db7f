"""Two processes of each service of a spoken turn, with tiny models whose results are exact; deaths, and lost sites."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from e2e import markov
from motet_gateway.config import GatewayConfig
from motet_gateway.service import Gateway
from motet_shared.testing import NatsServer, running
from motet_shared.wire.bus import Bus
from motet_shared.wire.discovery import Directory
from motet_shared.wire.stream import Stream
from motet_shared.wire.subjects import role_of
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.service import Tokenizer
from support.checkpoints import tts_checkpoints
from support.checkpoints.asr_checkpoints import tiny_whisper
from support.clients.realtime_client import Client, talking
from support.running.fork_server import ForkServer, alive

MODEL = "markov"
START_SECONDS = 240.0
TWO = 2  # of each
SITES = ("a", "b")  # one of each is at each


@dataclass
class Folders:
    """Checkpoints by role."""

    llm: Path
    asr: Path
    tts: Path

    @classmethod
    def made(cls, root: Path) -> Folders:
        return cls(
            markov.save(root / MODEL, sentences=True),
            tiny_whisper(root / "asr"),
            tts_checkpoints.pocket_tts(root / "tts", sample=True, threshold=1.0),
        )

    def argv(self, role: str) -> tuple[str, ...]:
        """Module and flags of a process."""
        return {
            "vad": ("motet_vad",),
            "asr": ("motet_asr", "--model", str(self.asr), "--name", "ears", *_EXACT_EARS),
            "tts": (
                "motet_tts",
                "--model",
                str(self.tts),
                "--name",
                "voice",
                *_SMALL_CHUNKS,
                "--threads",
                "1",
            ),
            "decode": ("motet_llm", "--model", str(self.llm), "--name", MODEL, "--threads", "1"),
        }[role]


_EXACT_EARS = (
    "--no-fallback",
    "--no-live",
    "--parallel",
    "1",
)  # live, what is heard depends on when
_SMALL_CHUNKS = ("--first-chunk", "0.002", "--chunk", "0.01")
_LOADED = (
    "motet_vad.service",
    "motet_asr.service",
    "motet_tts.service",
    "motet_llm.service",
    "transformers.models.whisper.modeling_whisper",
    "transformers.models.pocket_tts.modeling_pocket_tts",
    "transformers.models.llama.modeling_llama",
)
ROLES = ("vad", "asr", "decode", "tts")


@dataclass
class SpokenStack:
    """The gateway and the tokenizer run here; everything that can be killed is a process."""

    nats: NatsServer
    forks: ForkServer
    folders: Folders
    gateway: Gateway
    tokenizer: Tokenizer
    sites: dict[int, str] = field(default_factory=dict)  # of processes, by pid
    killed: list[tuple[str, str]] = field(default_factory=list)  # role and site
    dark: list[str] = field(default_factory=list)  # sites, until the next `restore`

    def caller(self, role: str) -> Bus:
        """Who opens streams at a role."""
        return self.tokenizer.bus if role == "decode" else self.gateway.bus

    def stream(self, role: str) -> Stream | None:
        """The one that an instance of this role is serving, if there is one."""
        streams = self.caller(role).caller.streams.values()
        return next(
            (s for s in streams if not s.done and s.instance and role_of(s.instance) == role), None
        )

    async def kill(self, role: str, when: Callable[[Stream], bool] = lambda stream: True) -> str:
        """SIGKILL of the instance that serves a stream of this role, as soon as `when` holds for it; its name.

        It is stopped first, and what it has sent by then arrives: the blow falls into the middle of the stream.
        """
        async with asyncio.timeout(60):
            while True:
                stream = await self._when(role, when)
                pid = self._pid(str(stream.instance))
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(0.05)
                if not stream.done:
                    os.kill(pid, signal.SIGKILL)
                    self.killed.append((role, self.sites[pid]))
                    return str(stream.instance)
                os.kill(pid, signal.SIGCONT)

    async def send_away(
        self, role: str, when: Callable[[Stream], bool] = lambda stream: True
    ) -> str:
        """Two SIGTERMs to the instance that serves a stream of this role: it takes no more, and hands over what it has.

        That is what a restart does, and a scale-down, once there has been time enough to end.
        """
        async with asyncio.timeout(60):
            stream = await self._when(role, when)
            instance, caller = str(stream.instance), self.caller(role)
            pid = self._pid(instance)
            os.kill(pid, signal.SIGTERM)
            await caller.directory.wait_for(lambda d: _state(d, role, instance) != "ready", 60)
            os.kill(pid, signal.SIGTERM)
            self.killed.append((role, self.sites[pid]))
            return instance

    async def darken(self, role: str, when: Callable[[Stream], bool]) -> str:
        """Stop all processes of the site that serves a stream of this role, until `restore`; the site's name."""
        async with asyncio.timeout(60):
            stream = await self._when(role, when)
        site = self.sites[self._pid(str(stream.instance))]
        self.dark.append(site)
        self._signal(site, signal.SIGSTOP)
        return site

    def _signal(self, site: str, number: signal.Signals) -> None:
        for pid, at in self.sites.items():
            if at == site and alive(pid):
                os.kill(pid, number)

    async def _when(self, role: str, when: Callable[[Stream], bool]) -> Stream:
        while (stream := self.stream(role)) is None or not when(stream):  # noqa: ASYNC110  # nothing tells of items
            await asyncio.sleep(0.001)
        return stream

    def _pid(self, instance: str) -> int:
        role = role_of(instance)
        return next(
            b.pid for b in self.caller(role).directory.instances(role) if b.instance == instance
        )

    async def begin(self, site: str, *roles: str) -> None:
        """Start a process for each at a site. `all_ready` waits for them."""
        for role in roles:
            module, *argv = self.folders.argv(role)
            pid = await self.forks.start(self.nats, module, *argv, f"--site={site}")
            self.sites[pid] = site

    async def restore(self) -> None:
        """Two of each again, instead of those that were killed, and both sites awake."""
        self.wake()
        for role, site in self.killed:
            await self.begin(site, role)
        self.killed.clear()
        await self.all_ready()

    def wake(self) -> None:
        """Let the processes of dark sites go on."""
        for site in self.dark:
            self._signal(site, signal.SIGCONT)
        self.dark.clear()

    async def all_ready(self) -> None:
        for role in ROLES:
            try:
                await self.caller(role).directory.wait_for(
                    partial(_both_ready, role), START_SECONDS
                )
            except TimeoutError:
                living = sum(map(alive, self.sites))
                raise TimeoutError(
                    f"two of {role} are not ready; of {len(self.sites)} processes {living} live"
                ) from None

    def talk(self, **session: Any) -> AbstractAsyncContextManager[Client]:
        """`async with stack.talk() as client:` is a session of its own."""
        return talking(f"ws://127.0.0.1:{self.gateway.port}/v1/realtime?model={MODEL}", **session)

    async def idle(self) -> None:
        """Nobody holds anything of a session that is over."""
        async with asyncio.timeout(30):
            while any(self.stream(role) for role in ROLES):  # noqa: ASYNC110  # it closes by itself
                await asyncio.sleep(0.01)
        for actor in (self.gateway, self.tokenizer):
            actor.check_integrity()


def _state(directory: Directory, role: str, instance: str) -> str:
    return next(
        (beat.state for beat in directory.instances(role) if beat.instance == instance), "gone"
    )


def _both_ready(role: str, directory: Directory) -> bool:
    return len(directory.ready(role)) == TWO


@asynccontextmanager
async def spoken_stack(root: Path) -> AsyncIterator[SpokenStack]:
    """Not all of it is ready yet: see `all_ready`."""
    folders = Folders.made(root)
    async with NatsServer() as nats, ForkServer(*_LOADED) as forks, AsyncExitStack() as stack:
        config = GatewayConfig(port=0, drain_timeout=1.0, patience=60.0)
        gateway = Gateway(config, await nats.bus("gateway"))
        tokenizer = Tokenizer(
            TokenizerConfig(model=(f"{MODEL}={folders.llm}",), metrics_port=-1),
            await nats.bus("tokenizer"),
        )
        for actor in (tokenizer, gateway):
            await stack.enter_async_context(running(actor))
        made = SpokenStack(nats, forks, folders, gateway, tokenizer)
        stack.callback(made.wake)
        for site in SITES:
            await made.begin(site, *ROLES)
        yield made
