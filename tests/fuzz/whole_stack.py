"""One of every service, with tiny models, in this process, on a real nats-server that forbids nobody anything."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from motet_asr.config import AsrConfig
from motet_asr.service import Asr
from motet_diffusion.config import DiffusionConfig
from motet_diffusion.service import Diffusion
from motet_embedding.config import EmbeddingConfig
from motet_embedding.service import Embedding
from motet_encoder.config import EncoderConfig
from motet_encoder.service import Encoder
from motet_gateway.config import GatewayConfig
from motet_gateway.service import Gateway
from motet_llm.config import DecodeConfig
from motet_llm.service import Decode
from motet_shared.process.actor import Actor
from motet_shared.process.config import ProcessConfig
from motet_shared.testing import NatsServer, free_port, running
from motet_shared.wire.bus import Bus
from motet_shared.wire.transport import NatsTransport
from motet_speakers.config import SpeakersConfig
from motet_speakers.service import Speakers
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.service import Tokenizer
from motet_tts.config import TtsConfig
from motet_tts.service import Tts
from motet_vad.config import VadConfig
from motet_vad.service import Vad
from support.checkpoints import tts_checkpoints
from support.checkpoints.asr_checkpoints import tiny_whisper
from support.checkpoints.diffusion_checkpoints import stable_diffusion
from support.checkpoints.embedding_checkpoints import sentence_transformer
from support.checkpoints.vlm_checkpoints import picture, tiny_vlm
from support.media.spoken import say, silence, wav

MODEL = "tiny"  # what each of them calls its own
FUZZER = "fuzzer"  # a user of NATS
SPEAKERS = Path(__file__).parents[2] / "models" / "pocket-speakers"
SAID = "Two red circles and a blue square."
ROLES = (
    "gateway",
    "tokenizer",
    "decode",
    "encoder",
    "asr",
    "vad",
    "speakers",
    "tts",
    "embedding",
    "diffusion",
)
_START = 240.0  # seconds


@dataclass
class WholeStack:
    """`port`: where nats-server tells who listens to what."""

    nats: NatsServer
    port: int
    actors: list[Actor]

    @property
    def gateway(self) -> Gateway:
        found = self.actors[-1]
        assert isinstance(found, Gateway)
        return found

    async def subjects(self) -> dict[str, list[str]]:
        """What each service listens to, by instance, as nats-server has it."""
        async with httpx.AsyncClient(trust_env=False) as http:
            reply = await http.get(
                f"http://127.0.0.1:{self.port}/connz", params={"subs": "true", "auth": "true"}
            )
        found: dict[str, list[str]] = {}
        for connection in reply.json()["connections"]:
            instance = connection.get("name", "").removesuffix("/frames")
            if connection["authorized_user"] != FUZZER and instance:
                found.setdefault(instance, []).extend(connection.get("subscriptions_list", []))
        return found

    async def answers(self) -> dict[str, Any]:
        """What clients get from the services, all of which take part. Raises for anything but success."""
        sound = wav(silence(200) + say(SAID) + silence(200))
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.gateway.port}/v1", trust_env=False, timeout=60
        ) as http:

            async def post(path: str, **options: Any) -> httpx.Response:
                reply = await http.post(path, **options)
                assert reply.status_code == 200, f"{path}: {reply.text[:1000]}"
                return reply

            chat = await post("/chat/completions", json=_chat())
            drawn = await post(
                "/images/generations",
                json={"prompt": "two circles", "size": "32x32", "steps": 2, "seed": 3},
            )
            spoken = await post("/audio/speech", json=_SPEECH)
            vectors = await post("/embeddings", json={"model": MODEL, "input": ["ba be", "di"]})
            form = {"model": MODEL, "language": "en", "response_format": "diarized_json"}
            heard = await post("/audio/transcriptions", data=form, files={"file": ("a.wav", sound)})
            return {
                "chat": chat.json()["choices"],
                "image": drawn.json()["data"],
                "speech": spoken.content,
                "embeddings": vectors.json()["data"],
                "transcript": [
                    (part["speaker"], part["text"]) for part in heard.json()["segments"]
                ],
            }

    async def idle(self, seconds: float = 60.0) -> None:
        """Nobody works, and nothing is left behind. What a call held is freed a step of its engine later."""
        until = time.monotonic() + seconds
        while (words := self._unsettled()) and time.monotonic() < until:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.02)
        assert not words, f"after {seconds:g} s: {words}"

    def _unsettled(self) -> dict[str, str]:
        """What actors say of themselves that are not idle, or not as idle ones should be."""
        return {actor.role: word for actor in self.actors if (word := actor.integrity()) != "ok"}

    def troubles(self) -> list[str]:
        """What no input may cause: a crash, an exception in a handler, a message that could not be encoded."""
        found = []
        for actor in self.actors:
            if actor._crashed.done():
                found.append(f"{actor.role} crashed: {actor._crashed.exception()!r}")
            for transport in (actor.bus.control, actor.bus.frames):
                assert isinstance(transport, NatsTransport)
                found += [
                    f"{actor.role}: {count} {name}" for name, count in transport.errors.items()
                ]
            if actor.bus.calls.outbox.failed:
                found.append(f"{actor.role} could not say {actor.bus.calls.outbox.failed} parts")
        return found


_SPEECH = {"model": MODEL, "input": "Hello you.", "response_format": "pcm", "seed": 3}


def png() -> bytes:
    file = io.BytesIO()
    shown: Image.Image = picture(1)
    shown.save(file, "PNG")
    return file.getvalue()


def _chat() -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    parts = [{"type": "text", "text": "abc"}, {"type": "image_url", "image_url": {"url": url}}]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": parts}],
        "temperature": 0,
        "max_tokens": 8,
    }


@asynccontextmanager
async def whole_stack(folder: Path) -> AsyncIterator[WholeStack]:
    """All of it ready."""
    folders = await asyncio.to_thread(_checkpoints, folder)
    port = free_port()
    async with (
        NatsServer(_permissive(folder / "nats.conf", port), users=(*ROLES, FUZZER)) as nats,
        AsyncExitStack() as stack,
    ):
        actors = [_actor(role, await nats.bus(role), folders) for role in reversed(ROLES)]
        for actor in actors:  # one by one: transformers does not load in two threads at a time
            await stack.enter_async_context(running(actor))
        gateway = actors[-1]
        await gateway.bus.directory.wait_for(lambda d: all(d.ready(role) for role in ROLES), _START)
        yield WholeStack(nats, port, actors)


def _checkpoints(folder: Path) -> dict[str, Path]:
    eyes = tiny_vlm("llava_clip", folder / "eyes")
    return {
        "decode": eyes,
        "tokenizer": eyes,
        "encoder": eyes,
        "asr": tiny_whisper(folder / "ears"),
        "speakers": SPEAKERS,
        "tts": tts_checkpoints.pocket_tts(folder / "voice", sample=True, threshold=1.0),
        "embedding": sentence_transformer(folder / "vectors"),
        "diffusion": stable_diffusion(folder / "brush"),
    }


def _actor(role: str, bus: Bus, folders: dict[str, Path]) -> Actor:
    """With limits that a test can reach, so that what is too much is refused."""
    own: dict[str, Any] = {"metrics_port": -1}
    if role in folders and role != "tokenizer":
        own |= {"model": str(folders[role]), "name": MODEL}
    small: dict[str, tuple[type[Actor], type[ProcessConfig], dict[str, Any]]] = {
        "gateway": (
            Gateway,
            GatewayConfig,
            {"port": 0, "drain_timeout": 1.0, "upload_memory": 32 << 20},
        ),
        "tokenizer": (
            Tokenizer,
            TokenizerConfig,
            {"model": (f"{MODEL}={folders['decode']}",), "decode_wait": 3.0},
        ),
        "decode": (
            Decode,
            DecodeConfig,
            {"threads": 1, "num_blocks": 200, "block_size": 8, "max_running": 8},
        ),
        "encoder": (Encoder, EncoderConfig, {"threads": 1, "cache_memory": 4 << 20}),
        "asr": (Asr, AsrConfig, {"threads": 1, "fallback": False, "max_files": 8}),
        "vad": (Vad, VadConfig, {"max_active": 32}),
        "speakers": (Speakers, SpeakersConfig, {}),
        "tts": (Tts, TtsConfig, {"threads": 1, "first_chunk": 0.002, "chunk": 0.01}),
        "embedding": (Embedding, EmbeddingConfig, {"threads": 1}),
        "diffusion": (
            Diffusion,
            DiffusionConfig,
            {"threads": 1, "max_pixels": 1 << 14, "max_running": 4},
        ),
    }
    actor, config, settings = small[role]
    return actor(config(**own, **settings), bus)


def _permissive(file: Path, port: int) -> Path:
    """Settings under which everybody may say everything: what services stand, whoever says it."""
    users = "\n".join(
        f"{{ user: {role}, password: $PASSWORD_{role.upper()} }}" for role in (*ROLES, FUZZER)
    )
    file.write_text(
        f'http: "127.0.0.1:{port}"\nmax_payload: 4MB\nmax_pending: 64MB\nauthorization {{'
        f' include "server/passwords.conf"\nusers: [\n{users}\n] }}'
    )
    return file
