"""Run a gateway's bus, one tokenizer, and scripted decode instances."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from motet_shared.messages import Chat, Complete, End, Sampling, Text
from motet_shared.testing import MemoryHub, memory_bus, running, settle
from motet_shared.wire.bus import Bus
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.service import Tokenizer
from support.checkpoints.tiny_tokenizers import EOS, byte_level
from support.services.scripted_decode import MODEL, ScriptedDecode

REPLY = "Two red circles were drawn to the left of my blue square. 👩‍🚀 naïve Grüße!"
SCRIPT = [*byte_level().encode(REPLY).ids, EOS]
CALL = 'I draw.\n<tool_call>\n{"name": "draw", "arguments": {"shape": "star"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "draw", "parameters": {}}}


class Stage:
    """Hold a gateway's bus, one tokenizer, and decode instances that come and go."""

    def __init__(
        self, hub: MemoryHub, stack: contextlib.AsyncExitStack, gateway: Bus, tokenizer: Tokenizer
    ):
        self.hub = hub
        self.gateway = gateway
        self.tokenizer = tokenizer
        self._stack = stack

    async def decode(self, script: list[int] = SCRIPT, **settings: Any) -> ScriptedDecode:
        decode = ScriptedDecode(await memory_bus(self.hub, "decode"), script, **settings)
        await self._stack.enter_async_context(running(decode))
        await settle()
        return decode

    async def ask(self, request: Chat | Complete) -> Answer:
        answer = Answer()
        async with self.gateway.open("tokenizer", request) as stream:
            async for item in stream:
                assert isinstance(item, Text)
                answer.items.append(item)
        answer.end = stream.end or answer.end
        return answer

    async def idle(self) -> None:
        """Require that no state is left."""
        async with asyncio.timeout(20):
            while self.tokenizer.bus.calls.active:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self.tokenizer.check_integrity()


class Answer:
    def __init__(self) -> None:
        self.items: list[Text] = []
        self.end: End = End(0, 0)

    @property
    def text(self) -> str:
        return "".join([item.text for item in self.items])

    @property
    def reasoning(self) -> str:
        return "".join([item.reasoning for item in self.items])

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Return name and arguments of each tool call."""
        found: list[tuple[str, str]] = []
        for delta in [delta for item in self.items for delta in item.tools or ()]:
            if delta.id:
                found.append((delta.name, ""))
            found[-1] = found[-1][0], found[-1][1] + delta.arguments
        return found

    @property
    def ids(self) -> list[int]:
        return [i for item in self.items for i in item.ids]


@contextlib.asynccontextmanager
async def stage_in_memory(folder: Path, **settings: Any) -> AsyncIterator[Stage]:
    """Run a stage on an in-memory hub and require that no state is left at its end.

    folder: a checkpoint. settings: of the tokenizer.
    """
    hub = MemoryHub()
    async with contextlib.AsyncExitStack() as stack:
        gateway = await memory_bus(hub, "gateway")
        stack.push_async_callback(gateway.close)
        config = TokenizerConfig(
            model=(f"{MODEL}={folder}",), decode_wait=1.0, window=4, max_moves=2, **settings
        )
        tokenizer = Tokenizer(config, await memory_bus(hub, "tokenizer"))
        await stack.enter_async_context(running(tokenizer))
        await settle()
        stage = Stage(hub, stack, gateway, tokenizer)
        yield stage
        await stage.idle()


def chat(content: str = "Hello", sampling: Sampling | None = None, **fields: Any) -> Chat:
    messages = [{"role": "user", "content": content}]
    defaults: dict[str, Any] = {"model": MODEL, "messages": messages, "request_id": "r"}
    return Chat(**defaults | {"sampling": sampling or Sampling(seed=7)} | fields)
