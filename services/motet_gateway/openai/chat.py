"""Serve POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from motet_gateway.audio.spoken_chat import AudioChatChunks, ChatAudio, CollectedSpeech
from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.json_size import MAX_ENTRIES
from motet_gateway.images.chat_generation import (
    ChatImageGeneration,
    ImageChatChunks,
    chat_with_images,
    collector_with_images,
)
from motet_gateway.kept import draws
from motet_gateway.operations.loading import check_wait
from motet_gateway.operations.targets import pinned
from motet_gateway.tenancy.tenant import Ticket
from motet_gateway.tenancy.usage import expected_tokens
from motet_pipelines.chat.chat import Outcome, chat_with_prompt
from motet_pipelines.chat.models import accepts_images
from motet_pipelines.chat.vision import InputMedia
from motet_shared.errors import UnsupportedParameter
from motet_shared.messages import Chat, Complete, PromptPiece, Text, Usage

from .chat_images import leased_images, read_images
from .generate import ChoiceStreams, Source
from .prompt_scores import bounded_scores
from .prompt_size import PromptSize, read_prompt
from .render import ChatChunks, CompletionChunks
from .reply_details import ReplyDetails
from .requests import chat_requests, completion_requests, reply_details, wire_tools
from .results import Collected, chat_result, completion_result
from .schema import ChatBody, SamplingFields, parse_chat, parse_completion

Head = tuple[str, int, str]


async def chat_completions(service: GatewayContext, http: Exchange) -> None:
    """Answer a chat request, streamed or whole, with or without generated images."""
    body = parse_chat(
        await read_prompt(service, http, "messages", entries=MAX_ENTRIES), http.hints("chat")
    )
    body.model = service.admit(body.model)
    check_wait(http, service.bus.directory, "decode", body.model)
    size = PromptSize.of(service.bus.directory, "tokenizer", body.model, http.tenant)
    size.check_count(len(body.messages), "messages")
    size.check_tools(wire_tools(body.tools or []))
    is_seeing = accepts_images(service.bus.directory, body.model)
    generation = ChatImageGeneration.of(service, body, http.request_id)
    audio = await ChatAudio.of(service, http, body)
    if audio is not None and generation is not None:
        message = "`modalities`: a chat that generates images is not spoken; leave out `audio`"
        raise UnsupportedParameter(message, param="modalities")
    requests = chat_requests(body, http.request_id, http.tenant.rights, accepts_images=is_seeing)
    size.check_chat(requests[0])
    requests = pinned(http, service.bus.directory, requests)
    head = ("chatcmpl-" + draws.token_hex(12), draws.now(), body.model)
    images = len(requests) if generation is not None else 0
    if images and (named := _detail_named(body)):
        message = f"`{named}` is not supported in chats that generate images; omit it"
        raise UnsupportedParameter(message, param=named)
    with await http.tenant.take(
        len(requests), tokens=expected_tokens(requests), images=images
    ) as ticket:
        pictures = await read_images(service, body, accepts_images=is_seeing)
        if generation is None:
            await _plain(service, http, body, requests, pictures, head, ticket, audio)
            return
        store = await service.uploads()
        source = _reasoning(
            body, partial(chat_with_images, service, store, generation, pictures, is_seeing)
        )
        choices = ChoiceStreams(service, http, requests, source, ticket)
        if body.stream:
            await choices.stream(ImageChatChunks(generation, *head, **_usage(body)))
        else:
            await choices.collect(partial(chat_result, *head), collector_with_images(generation))


def _detail_named(body: ChatBody) -> str:
    """Return the parameter that asks for token ids or scores, or nothing."""
    if body.prompt_logprobs is not None:
        return "prompt_logprobs"
    return "return_token_ids" if body.return_token_ids else ""


async def _plain(
    service: GatewayContext,
    http: Exchange,
    body: ChatBody,
    requests: list[Chat],
    pictures: list[InputMedia],
    head: Head,
    ticket: Ticket,
    audio: ChatAudio | None,
) -> None:
    """Answer a chat request without image generation; its choices share the input images."""
    async with await leased_images(service, pictures) as images:
        requests = [msgspec.structs.replace(request, images=images) for request in requests]
        details = reply_details(body)
        pipeline = _pipeline(service) if audio is None else partial(audio.reply, service)
        source = bounded_scores(_reasoning(body, pipeline), details)
        choices = ChoiceStreams(service, http, requests, source, ticket)
        if audio is not None:
            await _spoken(body, choices, head, details, audio)
        elif body.stream:
            await choices.stream(ChatChunks(*head, **_usage(body), details=details))
        else:
            await choices.collect(partial(chat_result, *head, details=details))


async def _spoken(
    body: ChatBody, choices: ChoiceStreams, head: Head, details: ReplyDetails, audio: ChatAudio
) -> None:
    """Answer a spoken chat, streamed or whole."""
    if body.stream:
        await choices.stream(AudioChatChunks(*head, **_usage(body), details=details))
        return

    def render(spoken: list[Collected], usage: Usage) -> bytes:
        for choice in spoken:
            if isinstance(choice, CollectedSpeech):
                choice.audio = choice.message(audio.options)
        return chat_result(*head, spoken, usage, details=details)

    await choices.collect(render, CollectedSpeech, threaded=True)


async def completions(service: GatewayContext, http: Exchange) -> None:
    """Answer a plain completion request of one or several prompts, streamed or whole."""
    body = parse_completion(await read_prompt(service, http, "prompt"), http.hints("completions"))
    body.model = service.admit(body.model)
    check_wait(http, service.bus.directory, "decode", body.model)
    requests = completion_requests(body, http.request_id, http.tenant.rights)
    PromptSize.of(service.bus.directory, "tokenizer", body.model, http.tenant).check_completions(
        requests
    )
    requests = pinned(http, service.bus.directory, requests)
    prompts = len(requests) // (body.n or 1)
    with await http.tenant.take(len(requests), tokens=expected_tokens(requests, prompts)) as ticket:
        details = reply_details(body)
        source = bounded_scores(_pipeline(service), details)
        choices = ChoiceStreams(service, http, requests, source, ticket, prompts)
        head = ("cmpl-" + draws.token_hex(12), draws.now(), body.model)
        if body.stream:
            await choices.stream(CompletionChunks(*head, **_usage(body), details=details))
        else:
            await choices.collect(partial(completion_result, *head, details=details))


def _usage(body: SamplingFields) -> dict[str, Any]:
    """Return the options of the chunk renderer: which events of a stream carry the usage."""
    options = body.stream_options
    if options is None:
        return {}
    return {
        "include_usage": bool(options.include_usage),
        "continuous": bool(options.continuous_usage_stats),
    }


def _reasoning(body: ChatBody, source: Source) -> Source:
    """Return the source of replies with their reasoning, or without where the body refuses it."""
    if body.include_reasoning is not False:
        return source

    async def hidden(request: Chat, outcome: Outcome) -> AsyncGenerator[list[Any], None]:
        async with aclosing(source(request, outcome)) as batches:
            async for batch in batches:
                for item in batch:
                    if isinstance(item, Text):
                        item.reasoning = ""
                yield batch

    return hidden


def _pipeline(service: GatewayContext) -> Source:
    """Return the source of replies for requests without image generation."""
    config = service.config

    def asked(
        request: Chat | Complete, outcome: Outcome
    ) -> AsyncGenerator[list[Text | PromptPiece], None]:
        return chat_with_prompt(
            service.bus,
            request,
            outcome,
            deadline=config.request_timeout,
            patience=config.patience,
            sink=outcome.sink,
        )

    return asked
