"""Fake a tokenizer and a decode service without a model, for tests of the gateway and of pipelines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from motet_shared.errors import MotetError
from motet_shared.messages import (
    Chat,
    Complete,
    Detokenize,
    ModelCard,
    Text,
    TokenIds,
    Tokenize,
    ToolCallDelta,
    Usage,
)
from motet_shared.process.actor import Actor, operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_shared.wire.epochs import Epoch

MODEL = "pocket-fake"
Reply = Callable[[Chat | Complete], list[Text]]


def words(text: str) -> list[Text]:
    """Return one item per word, with made-up token ids."""
    return [Text(word, [index]) for index, word in enumerate(_split(text))]


def tool_call(arguments: str, name: str = "draw", index: int = 0) -> Text:
    """Return a tool call as the tokenizer sends it."""
    return Text(
        "",
        [99],
        [ToolCallDelta(index, f"call_{index}", name), ToolCallDelta(index, arguments=arguments)],
    )


def _split(text: str) -> list[str]:
    head, *rest = text.split(" ")
    return [head, *(" " + word for word in rest)]


def echo(request: Chat | Complete) -> list[Text]:
    """Reply with the user's message, the default."""
    if isinstance(request, Complete):
        return words(str(request.prompt))
    return words("You said: " + str(request.messages[-1]["content"]))


class FakeTokenizer(Actor):
    """Send what `reply` makes of a request, one item per `pace` seconds, and record requests.

    A `Resume` is honoured as by the real service: items that the caller has are left out.

    on_request: is waited for before a request is answered.
    """

    role = "tokenizer"

    def __init__(self, config: Any, bus: Bus):
        super().__init__(config, bus)
        self.card = ModelCard(
            name=MODEL, context=4096, created=1_750_000_000, tools=True, images=True
        )
        self.on_request: Callable[[Chat | Complete], Awaitable[None]] | None = None
        self.reply: Reply = echo
        self.pace = 0.0
        self.status = "stop"
        self.error: MotetError | None = None
        self.fail_after: int | None = None  # items before `error` is raised; None: at once
        self.requests: list[Any] = []
        self.epochs: list[Epoch] = []
        self.cancelled = 0
        self.sent = 0

    def models(self) -> list[ModelCard]:
        return [self.card]

    @operation(Chat)
    async def chat(self, call: Call, request: Chat) -> None:
        await self._answer(call, request)

    @operation(Complete)
    async def complete(self, call: Call, request: Complete) -> None:
        await self._answer(call, request)

    @operation(Tokenize)
    async def tokenize(self, call: Call, request: Tokenize) -> None:
        """Give a token per word of a prompt: its number in the prompt."""
        words = _words(request.prompt)
        if not request.count_only:
            await call.send(TokenIds(list(range(len(words))), words if request.pieces else []))
        call.finish("stop", Usage(prompt_tokens=len(words)))

    @operation(Detokenize)
    async def detokenize(self, call: Call, request: Detokenize) -> None:
        """Give the token ids as decimal numbers."""
        await call.send(Text(" ".join(map(str, request.ids)), request.ids))
        call.finish("stop")

    async def _answer(self, call: Call, request: Chat | Complete) -> None:
        self.requests.append(request)
        self.epochs.append(call.epoch)
        if self.on_request is not None:
            await self.on_request(request)
        items = self.reply(request)
        known = len(request.resume.ids) if request.resume is not None else 0
        try:
            await self._say(call, _after(items, known))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        count = sum(len(item.ids) for item in items)
        usage = Usage(prompt_tokens=7, completion_tokens=count, cached_tokens=3)
        call.finish(self.status, usage, {"tokenizer.encode": 0.001, "decode.prefill": 0.002})

    async def _say(self, call: Call, items: list[Text]) -> None:
        for index, item in enumerate(items):
            if self.error is not None and index == (self.fail_after or 0):
                raise self.error
            await call.send(item)
            self.sent += 1
            if self.pace:
                await asyncio.sleep(self.pace)


def _words(prompt: Chat | Complete) -> list[str]:
    """Return the words of a prompt; a prompt of token ids has one for each."""
    if isinstance(prompt, Chat):
        return " ".join(str(message.get("content")) for message in prompt.messages).split()
    return (
        prompt.prompt.split() if isinstance(prompt.prompt, str) else list(map(str, prompt.prompt))
    )


def _after(items: list[Text], known: int) -> list[Text]:
    """Return the items after the first `known` token ids."""
    for index, item in enumerate(items):
        if known <= 0:
            return items[index:]
        known -= len(item.ids)
    return []


class FakeDecode(Actor):
    """Announce the model and serve nothing."""

    role = "decode"

    targets = ("",)  # names of the targets that it announces itself as
    refuses_images = False

    def models(self) -> list[ModelCard]:
        return [
            ModelCard(
                name=MODEL,
                context=4096,
                created=1_750_000_000,
                target=target,
                refuses_images=self.refuses_images,
            )
            for target in self.targets
        ]


class FakeEncoder(FakeDecode):
    """Announce that the model's pictures and sounds can be encoded."""

    role = "encoder"


@asynccontextmanager
async def fake_services(tokenizer: Bus, decode: Bus) -> AsyncIterator[FakeTokenizer]:
    """Start both; the buses stay open."""
    actors = FakeTokenizer(None, tokenizer), FakeDecode(None, decode)
    for actor in actors:
        await actor.start()
    yield actors[0]
