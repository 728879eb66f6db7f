"""POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial

import msgspec

from motet_pipelines.chat import Outcome, chat
from motet_pipelines.models import sees
from motet_pipelines.see import Shown, lent_pictures
from motet_shared.messages import Chat, Complete, Image, Text

from .asgi import Exchange
from .chat_images import given_pictures
from .generate import Generation, Source
from .painted import PaintedChunks, Painting, collected, painted
from .render import ChatChunks, CompletionChunks
from .results import chat_result, completion_result
from .schema import ChatBody, SamplingFields, parse_chat, parse_completion
from .service import Service
from .tenants import Ticket
from .usage import expected_tokens
from .wire import chat_requests, completion_requests

Head = tuple[str, int, str]


async def chat_completions(service: Service, http: Exchange) -> None:
    """Chat, streamed or whole, with pictures or without."""
    body = parse_chat(await http.body(service.config.max_body))
    service.admit(body.model)
    is_seeing = sees(service.bus.directory, body.model)
    painting = Painting.of(service, body, http.request_id)
    requests = chat_requests(body, http.request_id, http.tenant.rights, sees=is_seeing)
    head = ("chatcmpl-" + secrets.token_hex(12), int(time.time()), body.model)
    images = len(requests) if painting is not None else 0
    with http.tenant.take(len(requests), tokens=expected_tokens(requests), images=images) as ticket:
        pictures = await given_pictures(service, body, sees=is_seeing)
        if painting is None:
            await _plain(service, http, body, requests, pictures, head, ticket)
            return
        store = await service.uploads()
        source = partial(painted, service, store, painting, pictures, is_seeing)
        generation = Generation(service, http, requests, source, ticket)
        if body.stream:
            await generation.stream(PaintedChunks(painting, *head, include_usage=_wants_usage(body)))
        else:
            await generation.collect(partial(chat_result, *head), collected(painting))


async def _plain(
    service: Service,
    http: Exchange,
    body: ChatBody,
    requests: list[Chat],
    pictures: list[Shown],
    head: Head,
    ticket: Ticket,
) -> None:
    """A chat in which nothing is drawn. Its choices share the pictures."""
    async with await _lent(service, pictures) as images:
        requests = [msgspec.structs.replace(request, images=images) for request in requests]
        generation = Generation(service, http, requests, _pipeline(service), ticket)
        if body.stream:
            await generation.stream(ChatChunks(*head, include_usage=_wants_usage(body)))
        else:
            await generation.collect(partial(chat_result, *head))


async def _lent(service: Service, pictures: list[Shown]) -> AbstractAsyncContextManager[list[Image]]:
    if not pictures:
        return nullcontext([])
    return lent_pictures(await service.uploads(), pictures, service.config.request_timeout)


async def completions(service: Service, http: Exchange) -> None:
    """Plain completions of one or several prompts, streamed or whole."""
    body = parse_completion(await http.body(service.config.max_body))
    service.admit(body.model)
    requests = completion_requests(body, http.request_id, http.tenant.rights)
    prompts = len(requests) // (body.n or 1)
    with http.tenant.take(len(requests), tokens=expected_tokens(requests, prompts)) as ticket:
        generation = Generation(service, http, requests, _pipeline(service), ticket, prompts)
        head = ("cmpl-" + secrets.token_hex(12), int(time.time()), body.model)
        if body.stream:
            await generation.stream(CompletionChunks(*head, include_usage=_wants_usage(body)))
        else:
            await generation.collect(partial(completion_result, *head))


def _wants_usage(body: SamplingFields) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _pipeline(service: Service) -> Source:
    """Of requests in which nothing is drawn."""
    config = service.config

    def asked(request: Chat | Complete, outcome: Outcome) -> AsyncGenerator[list[Text], None]:
        return chat(service.bus, request, outcome, deadline=config.request_timeout, patience=config.patience)

    return asked
