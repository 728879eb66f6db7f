"""POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

import secrets
import time
from functools import partial

import msgspec

from .asgi import Exchange
from .chat_images import lent_images
from .generate import Generation
from .render import ChatChunks, CompletionChunks
from .results import chat_result, completion_result
from .schema import SamplingFields, parse_chat, parse_completion
from .service import Service
from .wire import chat_requests, completion_requests


async def chat_completions(service: Service, http: Exchange) -> None:
    """Chat, streamed or whole."""
    body = parse_chat(await http.body(service.config.max_body))
    service.admit(body.model)
    requests = chat_requests(body, http.request_id)
    with service.limits.take(len(requests)):
        async with lent_images(service, body) as images:
            requests = [msgspec.structs.replace(request, images=images) for request in requests]
            generation = Generation(service, http, requests)
            head = ("chatcmpl-" + secrets.token_hex(12), int(time.time()), body.model)
            if body.stream:
                await generation.stream(ChatChunks(*head, include_usage=_wants_usage(body)))
            else:
                await generation.collect(partial(chat_result, *head))


async def completions(service: Service, http: Exchange) -> None:
    """Plain completions of one or several prompts, streamed or whole."""
    body = parse_completion(await http.body(service.config.max_body))
    service.admit(body.model)
    requests = completion_requests(body, http.request_id)
    with service.limits.take(len(requests)):
        generation = Generation(service, http, requests, prompts=len(requests) // (body.n or 1))
        head = ("cmpl-" + secrets.token_hex(12), int(time.time()), body.model)
        if body.stream:
            await generation.stream(CompletionChunks(*head, include_usage=_wants_usage(body)))
        else:
            await generation.collect(partial(completion_result, *head))


def _wants_usage(body: SamplingFields) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)
