"""Serve POST /tokenize and POST /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from motet_gateway.context import GatewayContext
from motet_gateway.http.decoding import Decoder
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.fields import Count, Strict
from motet_gateway.http.json_size import MAX_ENTRIES, MAX_IDS
from motet_gateway.openai.param_names import ParamNames
from motet_gateway.openai.prepared_chat import prepare_chat
from motet_gateway.openai.prompt_size import PromptSize, read_prompt
from motet_gateway.openai.schema import ChatBody, Message, Tool
from motet_pipelines.chat.tokens import detokenize, tokenize
from motet_shared.errors import BadRequest
from motet_shared.messages import Complete, Detokenize, Sampling, Tokenize


class TokenizeBody(Strict):
    """Body of POST /tokenize: a raw `prompt`, or the `messages` of a chat."""

    model: str
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Strict):
    """Body of POST /detokenize."""

    model: str
    tokens: list[Count]


_tokenize = Decoder(TokenizeBody)
_detokenize = Decoder(DetokenizeBody)


async def tokenize_prompt(service: GatewayContext, http: Exchange) -> None:
    """Answer POST /tokenize: the token ids of a prompt or a chat, templated as for a reply."""
    body = _tokenize.decode(
        await read_prompt(service, http, "prompt", entries=MAX_ENTRIES), http.hints("tokenize")
    )
    body.model = service.admit(body.model)
    size = PromptSize.of(service.bus.directory, "tokenizer", body.model, http.tenant)
    config = service.config
    with await http.tenant.take(1):
        async with http.while_connected():
            found = await tokenize(
                service.bus,
                await _request(service, http, body, size),
                deadline=config.request_timeout,
                patience=config.patience,
            )
        answer = {
            "count": len(found.ids),
            "max_model_len": size.tokens,
            "tokens": found.ids,
            "token_strs": found.pieces if body.return_token_strs else None,
        }
        await http.reply(200, msgspec.json.encode(answer))


async def _request(
    service: GatewayContext, http: Exchange, body: TokenizeBody, size: PromptSize
) -> Tokenize:
    """Return the request for the prompt or the messages of a body, after checking its size.

    Raises BadRequest unless exactly one of both is given, and for pictures.
    """
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("`prompt`: give either `prompt` or `messages`", param="prompt")
    if body.prompt is not None:
        size.check_text(body.prompt, "prompt")
        raw = Complete(
            model=body.model,
            prompt=body.prompt,
            sampling=Sampling(),
            request_id=http.request_id,
            tenant=http.tenant.rights.name,
        )
        return Tokenize(raw, special_tokens=body.add_special_tokens, pieces=body.return_token_strs)
    chat = ChatBody(
        model=body.model,
        messages=body.messages or [],
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    asked = await prepare_chat(service, http.tenant, chat, http.request_id, ParamNames())
    asked.check_size()
    if asked.pictures:
        message = "`messages`: pictures are not tokenized here; send the text alone"
        raise BadRequest(message, param="messages")
    return Tokenize(asked.chat, pieces=body.return_token_strs)


async def detokenize_prompt(service: GatewayContext, http: Exchange) -> None:
    """Answer POST /detokenize: the text of token ids, special tokens by their names."""
    body = _detokenize.decode(
        await read_prompt(service, http, "tokens", entries=MAX_IDS), http.hints("tokenize")
    )
    model = service.admit(body.model)
    PromptSize.of(service.bus.directory, "tokenizer", model, http.tenant).check_count(
        len(body.tokens), "tokens"
    )
    request = Detokenize(
        model=model, ids=body.tokens, request_id=http.request_id, tenant=http.tenant.rights.name
    )
    config = service.config
    with await http.tenant.take(1):
        async with http.while_connected():
            text = await detokenize(
                service.bus, request, deadline=config.request_timeout, patience=config.patience
            )
        await http.reply(200, msgspec.json.encode({"prompt": text}))
