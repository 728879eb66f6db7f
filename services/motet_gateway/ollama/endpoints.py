"""Serve POST /api/chat and POST /api/generate."""

from __future__ import annotations

from msgspec.structs import replace

from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.json_size import MAX_ENTRIES
from motet_gateway.openai.param_names import ParamNames
from motet_gateway.openai.prepared_chat import PreparedChat, prepare_chat
from motet_gateway.openai.prompt_size import PromptSize, read_prompt
from motet_gateway.openai.requests import completion_requests
from motet_gateway.openai.schema import ChatBody
from motet_pipelines.chat.models import cards_of
from motet_shared.messages import ModelCard

from .chat_body import chat_body, check_generate, completion_body, generate_body
from .names import chat_model
from .replies import PreparedCompletion, answer
from .reply_lines import Kind
from .residency import keep, load_or_unload
from .schema import GenerateBody, ReplyFields, parse_chat, parse_generate


async def create_chat(service: GatewayContext, http: Exchange) -> None:
    """Answer a conversation; without messages, load the model or let it go."""
    data = await read_prompt(service, http, "messages", entries=MAX_ENTRIES)
    body = parse_chat(data, http.hints("ollama"))
    body.model = chat_model(service, body.model)
    if not body.messages:
        await load_or_unload(service, http, body, "chat")
        return
    given = chat_body(body, _card(service, body.model))
    await _answer(service, http, body, await _prepared(service, http, *given), "chat")


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
        asked: PreparedChat | PreparedCompletion = _completion(service, http, body)
    else:
        given = generate_body(body, _card(service, body.model))
        asked = await _prepared(service, http, *given)
    await _answer(service, http, body, asked, "generate")


def _card(service: GatewayContext, model: str) -> ModelCard | None:
    return next(iter(cards_of(service.bus.directory, model)), None)


async def _prepared(
    service: GatewayContext, http: Exchange, given: ChatBody, names: ParamNames
) -> PreparedChat:
    return await prepare_chat(service, http.tenant, given, http.request_id, names)


async def _answer(
    service: GatewayContext,
    http: Exchange,
    body: ReplyFields,
    asked: PreparedChat | PreparedCompletion,
    kind: Kind,
) -> None:
    """Note how long the model stays, and answer in lines or as a whole."""
    keep(service, http, body.model, body.keep_alive)
    await answer(service, http, asked, kind, stream=body.stream is not False)


def _completion(service: GatewayContext, http: Exchange, body: GenerateBody) -> PreparedCompletion:
    given, names = completion_body(body)
    with names.applied():
        (request,) = completion_requests(given, http.request_id, http.tenant.rights)
    # Without a limit a completion has 16 tokens in OpenAI's protocol, and no limit in Ollama's.
    request = replace(request, max_tokens=given.max_tokens)
    size = PromptSize.of(service.bus.directory, "tokenizer", body.model, http.tenant)
    return PreparedCompletion(request, size, names)
