"""The tokenizer actor: chat messages or a raw prompt in, text out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import msgspec

from motet_shared.actor import Actor, operation
from motet_shared.bus import Bus
from motet_shared.call import Call
from motet_shared.errors import BadRequest, ContextTooLong, UnknownModel
from motet_shared.messages import Chat, Complete, Generate, Grammar, ModelCard, Sampling, Seen
from motet_shared.telemetry import Stopwatch
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.generation import Counters, Generation, Surroundings
from motet_tokenizer.prefix_index import PrefixIndex
from motet_tokenizer.router import Router
from motet_tokenizer.seeing import Eyes
from motet_tokenizer.text import TextState
from motet_tokenizer.tool_grammar import grammar_of
from motet_tokenizer.tools import ToolParser
from motet_tokenizer.vocabulary import Vocabulary

T = TypeVar("T")


class Tokenizer(Actor):
    """Owns a request from text to text; the tokens in between come from a decode instance."""

    role = "tokenizer"

    def __init__(self, config: TokenizerConfig, bus: Bus):
        super().__init__(config, bus)
        self.max_active = config.max_active
        self.vocabularies: dict[str, Vocabulary] = {}
        self.counters = Counters()
        self._index = PrefixIndex(bus)
        router = Router(bus.directory, self._index, config.routing)
        self._around = Surroundings(bus, router, config, self.counters)
        self._eyes = Eyes(bus, config)
        self._threads = ThreadPoolExecutor(config.threads, thread_name_prefix="encode")

    async def warm(self) -> None:
        await self._index.start()
        loop = asyncio.get_running_loop()
        for name, path in self.config.models().items():
            self.vocabularies[name] = await loop.run_in_executor(self._threads, _load, name, path)

    async def close(self) -> None:
        await self._index.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def models(self) -> list[ModelCard]:
        return [vocabulary.card for vocabulary in self.vocabularies.values()]

    def load(self) -> dict[str, float]:
        """What a planner goes by: requests without an instance, all and by model, and tokens since the beginning."""
        counters = self.counters
        waiting = {f"waiting_for_decode/{model}": float(n) for model, n in counters.waiting_by_model.items() if n}
        return {"waiting_for_decode": float(counters.waiting_for_decode), "tokens": float(counters.tokens)} | waiting

    def stats(self) -> dict[str, Any]:
        known = {"cached_blocks_known": len(self._index), **self._index.counts}
        return {"active": len(self.bus.calls.active), **asdict(self.counters), **known}

    def check_integrity(self) -> None:
        """With no call active, none may be waiting for decode and no stream be open."""
        super().check_integrity()
        if not self.bus.calls.active and (self.counters.waiting_for_decode or self.bus.caller.streams):
            raise RuntimeError(
                f"no call is active, but {self.counters.waiting_for_decode} wait for decode "
                f"and {len(self.bus.caller.streams)} streams are open"
            )

    # ------------------------------------------------------------------------------------------------------ operations
    @operation(Chat)
    async def chat(self, call: Call, request: Chat) -> None:
        vocabulary = self._vocabulary(request.model)
        watch = Stopwatch("tokenizer")
        tools = request.tools if request.tool_choice != "none" else []
        grammar = grammar_of(request, tools)
        with watch.stage("encode"):
            size = _characters(request.messages, tools)
            prompt = await self._encode(size, lambda: vocabulary.template.encode(request.messages, tools))
        seen: list[Seen] = []
        if request.images or (vocabulary.placeholder is not None and vocabulary.placeholder in prompt):
            with watch.stage("see"):
                seen = await self._eyes.look(call, request)
            prompt = vocabulary.template.put_pictures(prompt, [picture.ids for picture in seen])
        parser = ToolParser(request.request_id or call.id) if tools else None
        await self._generate(call, request, vocabulary, prompt, watch, parser=parser, seen=seen, grammar=grammar)

    @operation(Complete)
    async def complete(self, call: Call, request: Complete) -> None:
        vocabulary = self._vocabulary(request.model)
        watch = Stopwatch("tokenizer")
        prompt, text = request.prompt, ""
        with watch.stage("encode"):
            if isinstance(prompt, str):
                text = prompt
                prompt = await self._encode(len(text), lambda: vocabulary.encode(text))
            else:
                vocabulary.check_ids(prompt, "prompt")
                text = vocabulary.decode(prompt) if request.echo else ""
        echo = text if request.echo else ""
        await self._generate(
            call, request, vocabulary, prompt, watch, continues=True, echo=echo, grammar=request.grammar
        )

    async def _generate(
        self,
        call: Call,
        request: Chat | Complete,
        vocabulary: Vocabulary,
        prompt: list[int],
        watch: Stopwatch,
        *,
        parser: ToolParser | None = None,
        continues: bool = False,
        echo: str = "",
        seen: Sequence[Seen] = (),
        grammar: Grammar | None = None,
    ) -> None:
        self.counters.prompt_tokens += len(prompt)
        room = self._room(vocabulary, prompt, request.max_context)
        sampling = _sampling(request, vocabulary, room)
        text = TextState(
            vocabulary.detokenizer(continues=continues),
            end_ids=frozenset(sampling.stop_token_ids),
            max_tokens=sampling.max_tokens,
            stops=request.stop,
            tools=parser,
            echo=echo,
        )
        generate = _generate_request(request, prompt, sampling, seen, grammar)
        generation = Generation(call, self._around, vocabulary, generate, text, watch)
        if isinstance(request, Chat):
            generation.look = partial(self._eyes.look, call, request)
        if request.resume is not None:
            generation.resume(request.resume)
        await generation.run()

    # --------------------------------------------------------------------------------------------------------- helpers
    def _vocabulary(self, model: str) -> Vocabulary:
        vocabulary = self.vocabularies.get(model) or self.vocabularies.get(self.bus.directory.base_of(model))
        if vocabulary is None:
            names = ", ".join(sorted(self.vocabularies))
            raise UnknownModel(f"model: {model!r} is not served; choose one of {names}", param="model")
        return vocabulary

    async def _encode(self, characters: int, work: Callable[[], T]) -> T:
        """Short prompts at once (a thread costs more than they do), long ones off the event loop."""
        if characters <= self.config.inline_chars:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _room(self, vocabulary: Vocabulary, prompt: list[int], most: int) -> int:
        """How many tokens the reply may have; `most`: what the caller is allowed altogether, 0: what the model takes.

        Raises for a prompt that leaves none.
        """
        if not prompt:
            raise BadRequest("prompt: is empty; give at least one token", param="prompt")
        context = self._around.router.context(vocabulary.name, vocabulary.context)
        if 0 < most < context and len(prompt) >= most:
            raise ContextTooLong(
                f"the prompt has {len(prompt)} tokens, but this key may use {most} tokens for prompt and "
                "reply together (max_context); shorten the prompt",
                param="messages",
            )
        if len(prompt) >= context:
            raise ContextTooLong(
                f"the prompt has {len(prompt)} tokens, but model {vocabulary.name!r} has a context of {context} tokens "
                "for prompt and reply together; shorten the prompt",
                param="messages",
            )
        return (min(context, most) if most else context) - len(prompt)


def _load(name: str, path: str) -> Vocabulary:
    """Load a vocabulary and use it once, so that the first request finds its template compiled."""
    vocabulary = Vocabulary.load(name, path)
    if vocabulary.template.source:
        with contextlib.suppress(BadRequest):  # a template may insist on a system message
            vocabulary.template.encode([{"role": "user", "content": "Hello"}], [])
    return vocabulary


def _generate_request(
    request: Chat | Complete, prompt: list[int], sampling: Sampling, seen: Sequence[Seen], grammar: Grammar | None
) -> Generate:
    return Generate(
        model=request.model,
        prompt=prompt,
        sampling=sampling,
        grammar=grammar,
        request_id=request.request_id,
        priority=request.priority,
        tenant=request.tenant,
        sights=[picture.sight for picture in seen],
    )


def _sampling(request: Chat | Complete, vocabulary: Vocabulary, room: int) -> Sampling:
    """What decode is asked for: no more tokens than there is room for, and an end at the model's end tokens."""
    sampling = request.sampling
    vocabulary.check_ids(list(sampling.logit_bias), "logit_bias")
    vocabulary.check_ids(sampling.stop_token_ids, "stop_token_ids")
    limit = room if request.max_tokens is None else min(request.max_tokens, room)
    if limit < 0:
        raise BadRequest(f"max_tokens: {limit} is negative; give 1 or more", param="max_tokens")
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else vocabulary.eos_ids)
    return msgspec.structs.replace(sampling, max_tokens=limit, stop_token_ids=sorted(ends))


def _characters(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int:
    """About how much text there is to encode; tool declarations are taken to be long."""
    total = 1000 * len(tools)
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, list):
            total += sum([len(str(part.get("text", ""))) for part in content if isinstance(part, dict)])
    return total
