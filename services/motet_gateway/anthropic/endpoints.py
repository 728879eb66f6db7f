"""Serve POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.json_size import MAX_ENTRIES
from motet_gateway.kept import draws
from motet_gateway.openai.chat_images import leased_images
from motet_gateway.openai.chat_reply import ChatReply
from motet_gateway.openai.prepared_chat import PreparedChat, prepare_chat
from motet_gateway.openai.prompt_size import read_prompt
from motet_gateway.operations.metrics import server_timing
from motet_gateway.tenancy.usage import expected_tokens
from motet_pipelines.chat.models import cards_of
from motet_pipelines.chat.tokens import count_tokens
from motet_shared.messages import Usage

from .chat_body import chat_body
from .content import Content, event, stopped, usage_of
from .schema import PromptFields, parse_count, parse_messages


async def create_message(service: GatewayContext, http: Exchange) -> None:
    """Answer a message, streamed or whole."""
    data = await read_prompt(service, http, "messages", entries=MAX_ENTRIES)
    body = parse_messages(data, http.hints("messages"))
    asked = await _prepared(service, http, body)
    with await http.tenant.take(1, tokens=expected_tokens([asked.chat])) as ticket:
        reply = ChatReply(service, ticket)
        if body.stream:
            await _stream(http, asked, reply)
        else:
            await _collect(http, asked, reply)


async def count_message_tokens(service: GatewayContext, http: Exchange) -> None:
    """Answer how many tokens the prompt of a message has."""
    data = await read_prompt(service, http, "messages", entries=MAX_ENTRIES)
    asked = await _prepared(service, http, parse_count(data, http.hints("messages")))
    asked.check_size()
    config = service.config
    with await http.tenant.take(1):
        async with http.while_connected():
            with asked.renamed():
                async with await leased_images(service, asked.pictures) as images:
                    count = await count_tokens(
                        service.bus,
                        msgspec.structs.replace(asked.chat, images=images),
                        deadline=config.request_timeout,
                        patience=config.patience,
                    )
            await http.reply(200, msgspec.json.encode({"input_tokens": count}))


async def _prepared(service: GatewayContext, http: Exchange, body: PromptFields) -> PreparedChat:
    body.model = service.admit(body.model)
    card = next(iter(cards_of(service.bus.directory, body.model)), None)
    given, names = chat_body(body, card)
    return await prepare_chat(service, http.tenant, given, http.request_id, names)


async def _collect(http: Exchange, asked: PreparedChat, reply: ChatReply) -> None:
    content, message = Content(), _message(asked.chat.model)
    async with http.while_connected():
        async with aclosing(reply.batches(asked)) as batches:
            async for batch in batches:
                content.add(batch)
        content.finish()
        message["content"] = content.blocks
        message |= stopped(reply.end, called_tools=content.called_tools)
        message["usage"] = usage_of(reply.end.usage)
        track = reply.track
        timing = [(b"server-timing", server_timing(track.stopwatch))] if track else []
        await http.reply(200, msgspec.json.encode(message), timing)


async def _stream(http: Exchange, asked: PreparedChat, reply: ChatReply) -> None:
    """Send events. The guard answers an error, or ends a stream that has begun with it."""
    async with http.while_connected():
        await _send(http, asked, reply)


async def _send(http: Exchange, asked: PreparedChat, reply: ChatReply) -> None:
    content, opening = Content(), b""
    async with aclosing(reply.batches(asked)) as batches:
        async for batch in batches:
            if not http.started:
                opening = _opening(asked.chat.model, batch[0].prompt_tokens if batch else 0)
            content.add(batch)
            # Blocks while the client does not read: its reply then gets no more credit.
            if data := opening + content.take():
                await http.write(data)
                opening = b""
    content.finish()
    end = reply.end
    if not http.started:
        opening = _opening(asked.chat.model, end.usage.prompt_tokens if end.usage else 0)
    delta = stopped(end, called_tools=content.called_tools)
    last = event("message_delta", delta=delta, usage=usage_of(end.usage)) + event("message_stop")
    await http.finish(opening + content.take() + last)


def _opening(model: str, prompt_tokens: int) -> bytes:
    message = _message(model)
    message["usage"] = usage_of(Usage(prompt_tokens=prompt_tokens))
    return event("message_start", message=message)


def _message(model: str) -> dict[str, Any]:
    return {
        "id": "msg_" + draws.token_hex(12),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {},
    }
