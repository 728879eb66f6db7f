"""Serve decode without a model, one token per stream and step, to measure everything else.

It honours credit like the real engine, and its streams end at `max_tokens`. Every token's text has
CHARS characters, so that the number of characters tells which token has arrived.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import string
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.stack.fake_prefill import BLOCK, FakePrefill
from motet_llm.cache.cache_events import CacheReporter
from motet_shared.messages import TIERS, Generate, ListBlocks, ModelCard, Tokens, Usage
from motet_shared.process.actor import Actor, operation, run
from motet_shared.process.config import Duration, ProcessConfig, setting
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

MODEL = "bench"
CHARS = 4  # of each token: a space and three letters, about the length of an English token
CONTEXT = 1 << 24
WORDS = 26**3
FIRST_ID = 256  # the ids before it are single bytes
_END = "<end>"
# A peer's frontend reads the shape; nothing here depends on it.
_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "eos_token_id": 0,
}


def save_checkpoint(folder: Path) -> Path:
    """Write a folder that the tokenizer service loads: vocabulary and chat template, no weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [
        "Ġ" + "".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=3)
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(alphabet + words)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shape = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(_SHAPE | shape))
    return folder


@dataclass(frozen=True, kw_only=True)
class FakeEngineConfig(ProcessConfig):
    """Define the flags of `python -m benchmarks.stack.fake_engine`."""

    rate: float = setting("steps per second; 0: as many as possible", default=0.0, min=0)
    prefill: float = setting("prompt tokens per second; 0: none take time", default=0.0, min=0)
    blocks: int = setting("blocks of the prefix cache, if prompts take time", default=4096, min=1)
    start: Duration = setting("how long it takes to load", default=0.0, min=0)
    emitted: Path | None = setting(
        "file to which each stream that ends adds its emission times", default=None
    )


@dataclass(slots=True, eq=False)
class _Running:
    call: Call
    request: Generate
    done: asyncio.Future[None]
    times: array[float] = field(default_factory=lambda: array("d"))
    prefilled: bool = True
    cached: int = 0


class FakeEngine(Actor):
    """Serve all streams in one step loop, as the real engine does."""

    role = "decode"
    max_active = 4096
    config: FakeEngineConfig

    def __init__(self, config: FakeEngineConfig, bus: Bus):
        super().__init__(config, bus)
        self._running: list[_Running] = []
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._record = config.emitted is not None
        self._words = [[FIRST_ID + i] for i in range(WORDS)]
        self._prefill = (
            FakePrefill[_Running](config.prefill, config.blocks) if config.prefill else None
        )
        self._reporter = CacheReporter(bus, self._prefill.changes if self._prefill else deque())

    async def warm(self) -> None:
        await asyncio.sleep(self.config.start)
        self.bus.monitor.duties.append(self._reporter.tick)
        self._loop = asyncio.create_task(self._steps())

    async def close(self) -> None:
        if self._loop is not None:
            self._loop.cancel()

    def models(self) -> list[ModelCard]:
        return [ModelCard(name=MODEL, context=CONTEXT, block_size=BLOCK if self._prefill else 0)]

    def load(self) -> dict[str, float]:
        if self._prefill is None:
            return {}
        ahead = {f"prefill_{tier}": self._prefill.tokens_left for tier in TIERS}
        pace = {"prefill_token": 1 / self._prefill.rate, "decode_row": 1e-3}
        return {"cache_updates": self._reporter.number, **ahead, **pace}

    def stats(self) -> dict[str, Any]:
        return {"running": len(self._running)}

    @operation(ListBlocks)
    async def list_blocks(self, call: Call, request: ListBlocks) -> None:
        await self._reporter.serve(call)

    @operation(Generate)
    async def generate(self, call: Call, request: Generate) -> None:
        """Send `max_tokens` tokens, one per step."""
        running = _Running(call, request, asyncio.get_running_loop().create_future())
        if self._prefill is not None:
            running.prefilled = False
            self._prefill.add(running, request.prompt)
        call.on_credit = lambda total: self._wake.set()
        self._running.append(running)
        self._wake.set()
        try:
            await running.done
        finally:
            self._running.remove(running)
            self._dump(running)
            if self._prefill is not None:
                self._prefill.drop(running)
                self._prefill.keep(
                    [*request.prompt, *(word for (word,) in self._words[: call.sent])]
                )
        usage = Usage(
            prompt_tokens=len(request.prompt),
            completion_tokens=call.sent,
            cached_tokens=running.cached,
        )
        call.finish("length", usage)

    async def _steps(self) -> None:
        """Run the step loop.

        Without a rate, it runs one step per iteration of the event loop and sleeps while no stream
        has credit.
        """
        period = 1 / self.config.rate if self.config.rate else 0.0
        due = monotonic()
        while True:
            if period:
                due = max(due + period, monotonic() - period)
                await asyncio.sleep(max(0.0, due - monotonic()))
                self._step()
            elif self._step():
                await asyncio.sleep(0)
            else:
                self._wake.clear()
                await self._wake.wait()

    def _step(self) -> int:
        """Send one token to every stream that has credit; return their number."""
        now, count, words = monotonic(), 0, self._words
        if self._prefill is not None:
            for running, cached in self._prefill.step(1 / self.config.rate):
                running.prefilled, running.cached = True, cached
        for running in self._running:
            call = running.call
            if running.prefilled and call.sent < call.credit_total and not running.done.done():
                count += 1
                if self._record:
                    running.times.append(now)
                call.push(Tokens(words[call.sent % WORDS]))
                if call.sent >= running.request.sampling.max_tokens:
                    running.done.set_result(None)
        return count

    def _dump(self, running: _Running) -> None:
        if self.config.emitted is not None:
            line = json.dumps(
                {"request": running.request.request_id, "times": running.times.tolist()}
            )
            with self.config.emitted.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    run(FakeEngine, FakeEngineConfig)
