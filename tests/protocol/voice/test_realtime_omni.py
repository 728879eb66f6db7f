"""A spoken conversation with an omni model: real services over nats-server, from a tiny checkpoint.

The thinker hears the user's sound, a recognizer transcribes it beside that, and the model speaks its
replies itself: interrupted by the user, and cut to what was heard.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from motet_asr.config import AsrConfig
from motet_asr.service import Asr
from motet_encoder.config import EncoderConfig
from motet_encoder.service import Encoder
from motet_gateway.config import GatewayConfig
from motet_gateway.service import Gateway
from motet_llm.config import DecodeConfig
from motet_llm.service import Decode
from motet_media.audio import duration_ms, pcm_bytes, wav_header
from motet_media.sound_file import read_audio
from motet_models.omni import talker_name
from motet_shared.process.actor import Actor
from motet_shared.testing import NatsServer, running
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.service import Tokenizer
from motet_tts.config import TtsConfig
from motet_tts.service import Tts
from motet_vad.config import VadConfig
from motet_vad.service import Vad
from support.checkpoints.asr_checkpoints import tiny_whisper
from support.clients.realtime_client import TRANSCRIPTION, Client, one, sound, talking
from support.families import processed_vlms
from support.families import qwen3_omni as omni
from support.media.spoken import say, silence
from support.running.until import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.slow]

MODEL, RATE = "omni", 24_000
TOKENS = 120
HELLO = say("Hello there, my friend.")
TURNS = {"type": "server_vad", "prefix_padding_ms": 0, "silence_duration_ms": 300}
SIZES: dict[str, Any] = {"num_blocks": 200, "block_size": 8, "token_budget": 64, "max_running": 4}


@dataclass
class Stage:
    reference: Any
    folder: Path
    gateway: Gateway
    actors: list[Actor]

    async def idle(self) -> None:
        """Require that nothing is computed any more, and that nothing is left of it.

        An engine drops the work of a call that was cancelled after the step that it is in.
        """
        engines = [
            actor.recognizer.thread.engine for actor in self.actors if isinstance(actor, Asr)
        ]
        await until(lambda: not any(actor.bus.calls.active for actor in self.actors))
        await until(lambda: not any(engine.has_work for engine in engines))
        for actor in self.actors:
            actor.check_integrity()


@asynccontextmanager
async def stage(root: Path) -> AsyncIterator[Stage]:
    folder, ears = root / MODEL, tiny_whisper(root / "ears")
    reference = omni.write(folder, endless=True)
    path = str(folder)
    off: dict[str, Any] = {"threads": 1, "metrics_port": -1}
    async with NatsServer() as nats, AsyncExitStack() as stack:

        async def bus(role: str) -> Any:
            return await nats.bus(role)

        thinker = DecodeConfig(model=path, name=MODEL, **off, **SIZES)
        talker = DecodeConfig(model=path, name=talker_name(MODEL), stage="talker", **off, **SIZES)
        speech = TtsConfig(model=path, name=MODEL, greedy=True, first_chunk=0.01, chunk=0.02, **off)
        actors = [
            Encoder(EncoderConfig(model=path, name=MODEL, **off), await bus("encoder")),
            Decode(thinker, await bus("decode")),
            Decode(talker, await bus("decode")),
            Tokenizer(TokenizerConfig(model=(f"{MODEL}={path}",)), await bus("tokenizer")),
            Tts(speech, await bus("tts")),
            Vad(VadConfig(metrics_port=-1), await bus("vad")),
            Asr(AsrConfig(model=str(ears), **off), await bus("asr")),
        ]
        gateway = Gateway(GatewayConfig(port=0, drain_timeout=1.0), await bus("gateway"))
        for actor in [*actors, gateway]:
            await stack.enter_async_context(running(actor))
        roles = ("encoder", "tokenizer", "tts", "vad", "asr")
        await gateway.bus.directory.wait_for(
            lambda d: (
                all(d.ready(role) for role in roles)
                and d.ready("decode", model=MODEL)
                and d.ready("decode", model=talker_name(MODEL))
            ),
            120,
        )
        yield Stage(reference, folder, gateway, actors)


async def speak(client: Client, pcm: bytes) -> None:
    """Send speech several times as fast as people speak."""
    for start in range(0, len(pcm), 4800):
        await client.audio(pcm[start : start + 4800])
        await asyncio.sleep(0.01)


@torch.inference_mode()
def expected(made: Stage, pcm: bytes) -> str:
    """Return what transformers answers to this sound, greedy."""
    processor = processed_vlms.reference_processor(made.folder)
    messages = [{"role": "user", "content": [{"type": "audio"}]}]
    text = processor.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    heard = read_audio(wav_header(RATE, len(pcm)) + pcm, 60.0)
    inputs = processor(text=[text], audio=[heard], add_special_tokens=False, return_tensors="pt")
    ids = made.reference.thinker.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    reply = ids[0, inputs["input_ids"].shape[1] :]
    return str(processor.tokenizer.decode(reply, skip_special_tokens=True))


async def test_an_omni_model_hears_and_speaks_itself(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        url = f"ws://127.0.0.1:{made.gateway.port}/v1/realtime?model={MODEL}"
        heard = {"turn_detection": TURNS, "transcription": {"model": "ears", "language": "en"}}
        audio = {"input": heard, "output": {"voice": "ethan"}}
        async with talking(
            url, audio=audio, temperature=0, max_output_tokens=TOKENS, output_modalities=["audio"]
        ) as client:
            sent = silence(300) + HELLO + silence(700)
            await speak(client, sent)
            events = await client.until("response.done")
            while not any(e["type"] == f"{TRANSCRIPTION}.completed" for e in events):
                events += await client.until(f"{TRANSCRIPTION}.completed")
            reply = next(e for e in events if e["type"] == "response.done")["response"]
            assert reply["status"] in ("completed", "incomplete")
            item = reply["output"][0]
            said = item["content"][0]["transcript"]
            start, stop = (
                one(events, f"input_audio_buffer.speech_{kind}")[f"audio_{name}_ms"]
                for kind, name in (("started", "start"), ("stopped", "end"))
            )
            whole = expected(made, sent[pcm_bytes(start, RATE) : pcm_bytes(stop, RATE)])
            assert said == whole
            assert one(events, f"{TRANSCRIPTION}.completed")["transcript"] != said
            spoken = sound(events)
            assert len(spoken) > 2000
            deltas = [e["delta"] for e in events if e["type"].endswith("_transcript.delta")]
            assert "".join(deltas) == said

            half = duration_ms(len(spoken), RATE) / 2
            await client.send(
                "conversation.item.truncate",
                item_id=item["id"],
                content_index=0,
                audio_end_ms=round(half),
            )
            await client.until("conversation.item.truncated")
            await client.send("conversation.item.retrieve", item_id=item["id"])
            kept = (await client.until("conversation.item.retrieved"))[-1]["item"]
            left = kept["content"][0]["transcript"]
            assert whole.startswith(left)
            assert 0.2 < len(left) / len(whole) < 0.6

            await speak(client, HELLO + silence(700))
            await client.until("response.output_audio.delta")
            interrupting = asyncio.create_task(speak(client, HELLO + HELLO))
            done = (await client.until("response.done"))[-1]["response"]
            await interrupting
            assert (done["status"], done["status_details"]["reason"]) == (
                "cancelled",
                "turn_detected",
            )
            assert said not in str(done)
        await made.idle()
