"""Serve POST /api/chat and POST /api/generate."""

from __future__ import annotations

from msgspec.structs import replace

from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.json_size import MAX_ENTRIES
from motet_gateway.openai.prepared_chat import prepare_chat
from motet_gateway.openai.prompt_size import PromptSize, read_prompt
from motet_gateway.openai.requests import completion_requests
from motet_pipelines.chat.models import cards_of

from .chat_body import chat_body, check_generate, completion_body, generate_body
from .names import chat_model
from .replies import PreparedCompletion, answer
from .residency import keep, load_or_unload
from .schema import GenerateBody, parse_chat, parse_generate


async def create_chat(service: GatewayContext, http: Exchange) -> None:
    """Answer a conversation; without messages, load the model or let it go."""
    data = await read_prompt(service, http, "messages", entries=MAX_ENTRIES)
    body = parse_chat(data, http.hints("ollama"))
    body.model = chat_model(service, body.model)
    if not body.messages:
        await load_or_unload(service, http, body, "chat")
        return
    card = next(iter(cards_of(service.bus.directory, body.model)), None)
    given, names = chat_body(body, card)
    asked = await prepare_chat(service, http.tenant, given, http.request_id, names)
    keep(service, http, body.model, body.keep_alive)
    await answer(service, http, asked, "chat", stream=body.stream is not False)


async def generate(service: GatewayContext, http: Exchange) -> None:
    """Answer a prompt; without one, load the model or let it go."""
    data = await read_prompt(service, http, "prompt", entries=MAX_ENTRIES)
    body = parse_generate(data, http.hints("ollama"))
    body.model = chat_model(service, body.model)
    check_generate(body)
    if not (body.prompt or body.suffix or body.images):
        await load_or_unload(service, http, body, "generate")
        return
    if body.raw or body.suffix:
        asked = _completion(service, http, body)
        keep(service, http, body.model, body.keep_alive)
        await answer(service, http, asked, "generate", stream=body.stream is not False)
        return
    card = next(iter(cards_of(service.bus.directory, body.model)), None)
    given, names = generate_body(body, card)
    chat = await prepare_chat(service, http.tenant, given, http.request_id, names)
    keep(service, http, body.model, body.keep_alive)
    await answer(service, http, chat, "generate", stream=body.stream is not False)


def _completion(service: GatewayContext, http: Exchange, body: GenerateBody) -> PreparedCompletion:
    given, names = completion_body(body)
    with names.applied():
        (request,) = completion_requests(given, http.request_id, http.tenant.rights)
    # Without a limit a completion has 16 tokens in OpenAI's protocol, and no limit in Ollama's.
    request = replace(request, max_tokens=given.max_tokens)
    size = PromptSize.of(service.bus.directory, "tokenizer", body.model, http.tenant)
    return PreparedCompletion(request, size, names)
