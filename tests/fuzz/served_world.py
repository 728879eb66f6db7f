"""A gateway on a loopback port, on a thread of its own, before services that answer at once: for clients that block."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from motet_gateway.config import GatewayConfig
from motet_gateway.service import Gateway
from motet_shared.errors import BadRequest
from motet_shared.messages import Transcribe
from motet_shared.testing import NatsServer, running
from motet_speakers.config import SpeakersConfig
from motet_speakers.service import Speakers
from motet_vad.config import VadConfig
from motet_vad.service import Vad
from support.services.drawing_services import Embedder, FakeDiffusion
from support.services.fake_services import FakeDecode, FakeTokenizer
from support.services.ranking_services import WordRanker
from support.services.voice_services import ScriptedAsr, ScriptedTts

_SPEAKERS = Path(__file__).parents[2] / "models" / "pocket-speakers"
_START = 120.0  # seconds
_ROLES = (
    "tokenizer",
    "decode",
    "asr",
    "tts",
    "vad",
    "speakers",
    "diffusion",
    "embedding",
    "ranking",
)


class CarefulAsr(ScriptedAsr):
    """It is given what is no sound, too."""

    async def sound(self, request: Transcribe) -> tuple[int, bytes]:
        try:
            return await super().sound(request)
        except struct.error:
            raise BadRequest("`file` holds no sound", param="file") from None


class ServedWorld:
    """`url` is that of the gateway. What went wrong on its thread is raised by `check`."""

    def __init__(self, folder: Path):
        self.url = ""
        self._folder = folder
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="world")
        self._error: BaseException | None = None

    def start(self) -> None:
        self._thread.start()
        self._ready.wait(_START)
        self.check()

    def check(self) -> None:
        if self._error is not None or not self.url:
            raise RuntimeError("the world is not there") from self._error

    def end(self) -> None:
        """Stop it, after a look at what is left behind."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        self.check()

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _live(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with NatsServer(store=self._folder) as nats, AsyncExitStack() as stack:
            buses = {role: await nats.bus(role) for role in (*_ROLES, "gateway")}
            gateway = Gateway(
                GatewayConfig(port=0, drain_timeout=1.0, patience=0.5, jobs=1), buses["gateway"]
            )
            tokenizer, decode = (
                FakeTokenizer(None, buses["tokenizer"]),
                FakeDecode(None, buses["decode"]),
            )
            speakers = Speakers(
                SpeakersConfig(model=str(_SPEAKERS), metrics_port=-1), buses["speakers"]
            )
            vad = Vad(VadConfig(metrics_port=-1), buses["vad"])
            sounds = (CarefulAsr(buses["asr"]), ScriptedTts(buses["tts"]), vad, speakers)
            others = (
                FakeDiffusion(buses["diffusion"]),
                Embedder(None, buses["embedding"]),
                WordRanker(None, buses["ranking"]),
            )
            for actor in (tokenizer, decode, *sounds, *others, gateway):
                await stack.enter_async_context(running(actor))
            await gateway.bus.directory.wait_for(
                lambda d: all(d.ready(role) for role in _ROLES), _START
            )
            self.url = f"http://127.0.0.1:{gateway.port}"
            self._ready.set()
            await self._stop.wait()
            async with asyncio.timeout(30):
                while gateway.bus.caller.streams:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            gateway.check_integrity()


@contextmanager
def served_world(folder: Path) -> Iterator[ServedWorld]:
    world = ServedWorld(folder)
    world.start()
    try:
        yield world
    finally:
        world.end()
