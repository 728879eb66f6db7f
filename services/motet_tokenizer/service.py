"""Serve the tokenizer actor: chat messages or a raw prompt in, text out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import msgspec

from motet_shared.errors import BadRequest, ContextTooLong, UnknownModel, UnsupportedParameter
from motet_shared.messages import (
    Chat,
    Complete,
    Detokenize,
    Generate,
    Grammar,
    ModelCard,
    Sampling,
    Tokenize,
    Usage,
)
from motet_shared.process.actor import Actor, operation
from motet_shared.process.fair_slots import FairSlots
from motet_shared.process.telemetry import Stopwatch
from motet_shared.reasoning.reply_parser import ReplyParser
from motet_shared.text.characters import characters
from motet_shared.tool_formats.parser import ToolParser
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.dialect import Dialect
from motet_tokenizer.encoding.encoder_pool import EncoderPool
from motet_tokenizer.encoding.encoder_process import EncodeJob
from motet_tokenizer.encoding.prompt_end import PromptEnd
from motet_tokenizer.encoding.vocabulary import Vocabulary
from motet_tokenizer.generation import Generation, GenerationContext, RequestCounters
from motet_tokenizer.image_encoding import ImageEncoding
from motet_tokenizer.prefix_index import PrefixIndex
from motet_tokenizer.prompt_images import PromptImages
from motet_tokenizer.prompt_parts import PromptParts, check_entries
from motet_tokenizer.router import Router
from motet_tokenizer.text import TextState
from motet_tokenizer.token_listing import send_ids, send_text
from motet_tokenizer.tool_grammar import grammar_of

T = TypeVar("T")


class Tokenizer(Actor):
    """Own a request from text to text; the tokens in between come from a decode instance."""

    role = "tokenizer"

    def __init__(self, config: TokenizerConfig, bus: Bus):
        super().__init__(config, bus)
        self.max_active = config.max_active
        self.vocabularies: dict[str, Vocabulary] = {}
        self.counters = RequestCounters()
        self._index = PrefixIndex(bus)
        router = Router(bus.directory, self._index, config.routing)
        self._shared = GenerationContext(bus, router, config, self.counters)
        self._image_encoding = ImageEncoding(bus, config)
        self._threads = ThreadPoolExecutor(config.threads, thread_name_prefix="encode")
        self._slots = FairSlots(config.threads)
        self._encoders = EncoderPool(
            config.models(),
            config.encoders,
            config.encode_limit,
            config.templates(),
            config.tool_format,
            config.reasoning_format,
        )

    async def warm(self) -> None:
        await self._index.start()
        loop = asyncio.get_running_loop()
        for name, path in self.config.models().items():
            self.vocabularies[name] = await loop.run_in_executor(
                self._threads, _load, self.config, name, path
            )

    async def close(self) -> None:
        await self._index.close()
        await self._encoders.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def models(self) -> list[ModelCard]:
        return [vocabulary.card for vocabulary in self.vocabularies.values()]

    def load(self) -> dict[str, float]:
        """Return the planner's inputs: requests without an instance, all and by model; tokens."""
        counters = self.counters
        waiting = {
            f"waiting_for_decode/{model}": float(n)
            for model, n in counters.waiting_by_model.items()
            if n
        }
        return {
            "waiting_for_decode": float(counters.waiting_for_decode),
            "tokens": float(counters.tokens),
        } | waiting

    def stats(self) -> dict[str, Any]:
        known = {"cached_blocks_known": len(self._index), **self._index.counts}
        return {"active": len(self.bus.calls.active), **asdict(self.counters), **known}

    def check_integrity(self) -> None:
        """Raise RuntimeError if, with no call active, one waits for decode or a stream is open."""
        super().check_integrity()
        if not self.bus.calls.active and (
            self.counters.waiting_for_decode or self.bus.caller.streams
        ):
            raise RuntimeError(
                f"no call is active, but {self.counters.waiting_for_decode} wait for decode "
                f"and {len(self.bus.caller.streams)} streams are open"
            )

    # ----------------------------------------------------------------------------------- operations
    @operation(Chat)
    async def chat(self, call: Call, request: Chat) -> None:
        vocabulary = self._vocabulary(request.model)
        stopwatch = Stopwatch("tokenizer")
        tools = _offered(request)
        dialect = vocabulary.dialect
        grammar = await self._grammar(request, tools, dialect)
        end = PromptEnd.of(request)
        prompt, images = await self._chat_prompt(call, request, vocabulary, stopwatch)
        if images is not None and self._encodes_first(request):
            with stopwatch.stage("media"):
                await images.encode()
            prompt = images.prompt
        request_id = request.request_id or call.id
        tail = partial(vocabulary.tail, prompt)
        beginning = dialect.beginning(tail)
        reply, parser = dialect.parsers(tail, beginning, request_id, tools)
        if grammar is not None:
            frame = dialect.frame(beginning, calls=grammar is not request.grammar)
            grammar = msgspec.structs.replace(grammar, frame=frame)
        await self._generate(
            call,
            request,
            vocabulary,
            prompt,
            stopwatch,
            reply=reply,
            parser=parser,
            continues=end.continues,
            images=images,
            grammar=grammar,
        )

    @operation(Complete)
    async def complete(self, call: Call, request: Complete) -> None:
        vocabulary = self._vocabulary(request.model)
        stopwatch = Stopwatch("tokenizer")
        with stopwatch.stage("encode"):
            prompt = await self._raw_prompt(request, vocabulary)
        echo = ""
        if request.echo:
            given = request.prompt
            echo = given if isinstance(given, str) else vocabulary.decode(prompt)
        await self._generate(
            call,
            request,
            vocabulary,
            prompt,
            stopwatch,
            continues=True,
            echo=echo,
            grammar=request.grammar,
        )

    @operation(Tokenize)
    async def tokenize(self, call: Call, request: Tokenize) -> None:
        """Send the ids that a chat or a raw prompt would be generated from."""
        given = request.prompt
        vocabulary = self._vocabulary(given.model)
        if isinstance(given, Chat):
            stopwatch = Stopwatch("tokenizer")
            ids, images = await self._chat_prompt(call, given, vocabulary, stopwatch)
            if images is not None:
                ids = await self._with_placeholders(given, images)
        else:
            ids = await self._raw_prompt(given, vocabulary, request.special_tokens)
        if not request.count_only:
            await send_ids(call, vocabulary, ids, pieces=request.pieces)
        call.finish(usage=Usage(prompt_tokens=len(ids)))

    @operation(Detokenize)
    async def detokenize(self, call: Call, request: Detokenize) -> None:
        vocabulary = self._vocabulary(request.model)
        vocabulary.check_ids(request.ids, "tokens")
        decode = partial(vocabulary.decode_all, request.ids)
        is_short = len(request.ids) <= self.config.inline_chars
        await send_text(
            call, decode() if is_short else await self._in_thread(request.tenant, decode)
        )

    async def _chat_prompt(
        self, call: Call, request: Chat, vocabulary: Vocabulary, stopwatch: Stopwatch
    ) -> tuple[list[int], PromptImages | None]:
        """Return the token ids of a chat, with a mark for each of its pictures, and the pictures."""
        tools = _offered(request)
        options = vocabulary.options.resolve(request.reasoning_effort, request.template_options)
        end = PromptEnd.of(request)
        with stopwatch.stage("encode"):
            job = EncodeJob(
                vocabulary.name,
                request.messages,
                tools,
                options,
                starts_turn=end.starts_turn,
                continues=end.continues,
            )
            size = characters([request.messages, tools], self.config.process_chars)
            encode = partial(vocabulary.template.encode, request.messages, tools, options, end)
            prompt = await self._encode(request.tenant, size, job, encode)
        marks = vocabulary.media_marks.values()
        if not request.images and not any(mark in prompt for mark in marks):
            return prompt, None
        self._image_encoding.check_count(request)
        encode_images = partial(self._image_encoding.encode_images, call, request)
        return prompt, PromptImages(request, prompt, vocabulary, encode_images)

    def _encodes_first(self, request: Chat) -> bool:
        """Return True if pictures are encoded before an instance is chosen, which may not need it.

        Scores of a prompt need all of its tokens.
        """
        cards = self._shared.router.first_cards(request.model, request.target)
        if any(not (card.takes_images or card.refuses_images) for card in cards):
            return True
        is_scored = request.sampling.prompt_logprobs >= 0
        return (is_scored or not cards) and self._image_encoding.is_possible(request.model)

    async def _with_placeholders(self, request: Chat, images: PromptImages) -> list[int]:
        """Return the ids of a prompt with pictures. Raises UnsupportedParameter without an encoder."""
        if not self._encodes_first(request) and not self._image_encoding.is_possible(request.model):
            raise UnsupportedParameter(
                f"messages: the tokens of pictures are known to the engine of model {request.model!r}"
                " alone; leave the pictures out",
                param="messages",
            )
        await images.encode()
        return images.prompt

    async def _raw_prompt(
        self, request: Complete, vocabulary: Vocabulary, special_tokens: bool = True
    ) -> list[int]:
        """Return the token ids of a raw prompt. Raises BadRequest for ids of no token."""
        prompt = request.prompt
        if not isinstance(prompt, str):
            vocabulary.check_ids(prompt, "prompt")
            return prompt
        suffix, size = request.suffix, len(prompt) + len(request.suffix)
        job = EncodeJob(vocabulary.name, text=prompt, suffix=suffix, special_tokens=special_tokens)
        encode = partial(vocabulary.encode, prompt, suffix, special_tokens=special_tokens)
        return await self._encode(request.tenant, size, job, encode)

    async def _generate(
        self,
        call: Call,
        request: Chat | Complete,
        vocabulary: Vocabulary,
        prompt: list[int],
        stopwatch: Stopwatch,
        *,
        reply: ReplyParser | None = None,
        parser: ToolParser | None = None,
        continues: bool = False,
        echo: str = "",
        images: PromptImages | None = None,
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
            reply=reply,
            controls=vocabulary.controls,
            tools=parser,
            echo=echo,
        )
        generate = _generate_request(request, prompt, sampling, grammar)
        generation = Generation(call, self._shared, vocabulary, generate, text, stopwatch)
        generation.target = request.target
        generation.returns_prompt = request.return_prompt and request.resume is None
        if sampling.prompt_logprobs >= 0:
            check_entries(len(prompt), sampling.prompt_logprobs)
            generation.prompt_parts = PromptParts(prompt, vocabulary.token_bytes)
        if isinstance(request, Chat):
            generation.chat = request
        if images is not None:
            images.context = len(prompt) + room
            generation.images = images
        if request.resume is not None:
            generation.resume(request.resume)
        await generation.run()

    # -------------------------------------------------------------------------------------- helpers
    def _vocabulary(self, model: str) -> Vocabulary:
        vocabulary = self.vocabularies.get(model) or self.vocabularies.get(
            self.bus.directory.base_of(model)
        )
        if vocabulary is None:
            names = ", ".join(sorted(self.vocabularies))
            raise UnknownModel(
                f"model: {model!r} is not served; choose one of {names}", param="model"
            )
        return vocabulary

    async def _encode(
        self, tenant: str, size: int, job: EncodeJob, work: Callable[[], list[int]]
    ) -> list[int]:
        """Encode short prompts inline, long ones in threads, the longest in processes.

        A thread costs more than a short prompt. Rust encodes without the interpreter's lock, but
        templates and JSON hold it, and threads cannot be killed.
        """
        if size <= self.config.inline_chars:
            return work()
        if size > self.config.process_chars:
            return await self._encoders.encode(_group(tenant), job)
        return await self._in_thread(tenant, work)

    async def _grammar(
        self, chat: Chat, tools: list[dict[str, Any]], dialect: Dialect
    ) -> Grammar | None:
        """Return the grammar of a reply; one of long tools or constraints is built in a thread."""
        most = self.config.inline_chars
        size = characters(tools, most) + (len(chat.grammar.text) if chat.grammar else 0)
        work = partial(grammar_of, chat, tools, dialect)
        return work() if size <= most else await self._in_thread(chat.tenant, work)

    async def _in_thread(self, tenant: str, work: Callable[[], T]) -> T:
        async with self._slots.slot(_group(tenant)):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _room(self, vocabulary: Vocabulary, prompt: list[int], most: int) -> int:
        """Return how many tokens the reply may have.

        `most`: limit of the caller for prompt and reply; 0: the model's context. Raises BadRequest
        for an empty prompt, ContextTooLong for one that leaves no room.
        """
        if not prompt:
            raise BadRequest("prompt: is empty; give at least one token", param="prompt")
        context = self._shared.router.context(vocabulary.name, vocabulary.context)
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


def _offered(request: Chat) -> list[dict[str, Any]]:
    """Return the tools that the model may call."""
    return request.tools if request.tool_choice != "none" else []


def _group(tenant: str) -> str:
    """Return the tenant of a user: users of a tenant share its slots."""
    return tenant.partition("\0")[0]


def _load(config: TokenizerConfig, name: str, path: str) -> Vocabulary:
    """Load a vocabulary and use it once, so that the first request finds its template compiled."""
    vocabulary = Vocabulary.load(
        name,
        path,
        config.tool_format,
        config.reasoning_format,
        chat_template=config.templates().get(name),
        generation_config=config.generation_config,
    )
    if vocabulary.template.source:
        with contextlib.suppress(BadRequest):  # a template may insist on a system message
            vocabulary.template.encode([{"role": "user", "content": "Hello"}], [])
    return vocabulary


def _generate_request(
    request: Chat | Complete,
    prompt: list[int],
    sampling: Sampling,
    grammar: Grammar | None,
) -> Generate:
    return Generate(
        model=request.model,
        prompt=prompt,
        sampling=sampling,
        grammar=grammar,
        request_id=request.request_id,
        priority=request.priority,
        tenant=request.tenant,
        return_states=isinstance(request, Chat) and request.return_states,
    )


def _sampling(request: Chat | Complete, vocabulary: Vocabulary, room: int) -> Sampling:
    """Return the sampling for decode: `max_tokens` within `room`, and the model's end tokens.

    A resumed request has received the log-probabilities of its prompt.
    Raises BadRequest for invalid token ids or a negative `max_tokens`.
    """
    sampling = vocabulary.sampling.complete(request.sampling)
    vocabulary.check_ids(list(sampling.logit_bias), "logit_bias")
    vocabulary.check_ids(sampling.stop_token_ids, "stop_token_ids")
    wanted = vocabulary.sampling.max_tokens if request.max_tokens is None else request.max_tokens
    limit = room if wanted is None else min(wanted, room)
    if limit < 0:
        raise BadRequest(f"max_tokens: {limit} is negative; give 1 or more", param="max_tokens")
    ends = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        ends |= vocabulary.eos_ids
        if isinstance(request, Complete) and request.suffix and vocabulary.infill is not None:
            ends |= vocabulary.infill.ends
    return msgspec.structs.replace(
        sampling,
        max_tokens=limit,
        stop_token_ids=sorted(ends),
        prompt_logprobs=sampling.prompt_logprobs if request.resume is None else -1,
    )
