"""Run the services of an omni model on one bus: encoder, thinker, talker and code2wav."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motet_llm.config import DecodeConfig
from motet_llm.service import Decode
from motet_models.omni import talker_name
from motet_pipelines.chat.chat import Outcome
from motet_pipelines.graphs.graph import Call, GraphOutcome, run
from motet_pipelines.graphs.spoken import OMNI, SPEAK, THINK
from motet_shared.messages import Audio, Chat, Sampling, SpeakStates, Text
from motet_shared.testing import die, memory_bus
from motet_tts.config import TtsConfig
from motet_tts.service import Tts
from support.stages.vlm_stage import MODEL, Stage, stage

TOKENS, SEED = 12, 5
PROMPT = [{"role": "user", "content": "Tell me."}]


@dataclass
class Reply:
    text: str = ""
    ids: list[int] = field(default_factory=list)
    pcm: bytes = b""
    kinds: list[str] = field(default_factory=list)
    ended: GraphOutcome = field(default_factory=GraphOutcome)


class Omni:
    """Run the stages of a checkpoint on one bus."""

    def __init__(self, made: Stage, voice: str):
        self.made, self.voice = made, voice

    async def thinker(self) -> Decode:
        await self.made.tokenizer()
        return await self.made.decode()

    async def talker(self, **settings: Any) -> Decode:
        config = DecodeConfig(
            model=str(self.made.folder),
            name=talker_name(MODEL),
            stage="talker",
            threads=1,
            metrics_port=-1,
            num_blocks=200,
            block_size=8,
            token_budget=64,
            max_running=8,
            **settings,
        )
        actor: Decode = await self.made.start(
            Decode(config, await memory_bus(self.made.hub, "decode"))
        )
        return actor

    async def code2wav(self, **settings: Any) -> Tts:
        config = TtsConfig(
            model=str(self.made.folder),
            name=MODEL,
            greedy=True,
            threads=1,
            metrics_port=-1,
            first_chunk=0.01,
            chunk=0.02,
            **settings,
        )
        actor: Tts = await self.made.start(Tts(config, await memory_bus(self.made.hub, "tts")))
        return actor

    async def kill_serving(self, talkers: list[Decode]) -> Decode:
        """Kill the talker that serves a call, as soon as one does, and return it."""
        async with asyncio.timeout(30):
            while True:
                if serving := [one for one in talkers if one.bus.calls.active]:
                    break
                await asyncio.sleep(0)
        [talker] = serving
        self.made.actors.remove(talker)
        die(talker.bus)
        return talker

    def call(self, messages: Any = PROMPT, images: Any = (), tokens: int = TOKENS) -> Call:
        sampling = Sampling(temperature=0, ignore_eos=True, max_tokens=tokens)
        chat = Chat(
            model=MODEL,
            messages=messages,
            images=[*images],
            sampling=sampling,
            max_tokens=tokens,
            return_states=True,
        )
        speech = SpeakStates(model=MODEL, voice=self.voice, seed=SEED)
        return Call(
            bus=self.made.gateway,
            requests={THINK: chat, SPEAK: speech},
            outcomes={THINK: Outcome()},
            patience=0.5,
        )

    async def answer(self, call: Call) -> Reply:
        reply = Reply()
        async with aclosing(run(OMNI, call, reply.ended)) as batches:
            async for batch in batches:
                for item in batch:
                    reply.kinds.append(type(item).__name__)
                    if isinstance(item, Text):
                        reply.text += item.text
                        reply.ids += item.ids
                    elif isinstance(item, Audio):
                        reply.pcm += item.data
        return reply


@asynccontextmanager
async def services(folder: Path, voice: str = "Ethan") -> AsyncIterator[Omni]:
    """Yield what starts the services of a checkpoint; no process is started."""
    async with stage(folder) as made:
        yield Omni(made, voice)
