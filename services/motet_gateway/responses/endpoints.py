"""Serve POST /v1/responses."""

from __future__ import annotations

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.json_size import MAX_ENTRIES
from motet_gateway.openai.prompt_size import read_prompt
from motet_gateway.openai.requests import random_seed
from motet_gateway.storage.jetstream import ERRORS, unavailable
from motet_gateway.tenancy.usage import expected_tokens
from motet_shared.errors import Unavailable

from .chat_request import ChatRequest, chat_request
from .follow import follow
from .foreground import Foreground
from .history import Conversation, conversation
from .resource import Resource, new_resource
from .schema import ResponseBody, parse_response
from .store import ResponseStore, StoredResponse, job_of

NO_STORE = "responses are not stored here; the server needs JetStream (motet up --store FOLDER)"


async def create_response(service: GatewayContext, http: Exchange) -> None:
    """Answer a response: streamed, whole, or in the background."""
    data = await read_prompt(service, http, "input", entries=MAX_ENTRIES)
    body = parse_response(data, http.hints("responses"))
    body.model = service.admit(body.model)
    tenant, store = http.tenant, service.responses
    priority = tenant.rights.priority(body.service_tier)
    resource = new_resource(body, priority, stored=_is_stored(body, store))
    if store is not None and resource["store"]:
        await store.check_room(tenant.owner, len(data))
    most = service.config.max_body
    given = await conversation(store, tenant.owner, body, str(resource["id"]), most)
    chat = await chat_request(service, tenant, body, given.placed, http.request_id)
    if body.background:
        await _enqueue(service, http, body, chat, given, resource)
        return
    images = 0 if chat.generation is None else 1
    with await tenant.take(1, tokens=expected_tokens([chat.chat]), images=images) as ticket:
        response = Foreground(service, http, body, chat, given, resource, ticket)
        await (response.stream() if body.stream else response.collect())


def _is_stored(body: ResponseBody, store: ResponseStore | None) -> bool:
    """Return True if the response is stored, which is the default where there is a store.

    Raises Unavailable if the client asks for what needs a store and there is none.
    """
    if store is None and (body.store or body.background):
        raise Unavailable(NO_STORE, param="store" if body.store else "background")
    return store is not None and body.store is not False


async def _enqueue(
    service: GatewayContext,
    http: Exchange,
    body: ResponseBody,
    chat: ChatRequest,
    given: Conversation,
    resource: Resource,
) -> None:
    """Store a response that runs in the background; answer it, or the events of it, at once."""
    store, queue = service.responses, service.response_queue
    if store is None or queue is None:
        raise Unavailable(NO_STORE, param="background")
    if body.truncation != "auto":
        chat.check_size()
    seed = random_seed() if body.seed is None else body.seed
    fields = msgspec.to_builtins(msgspec.structs.replace(body, input=""))
    record = StoredResponse(
        resource=resource, chain=given.chain, body=fields, seed=seed, request_id=http.request_id
    )
    owner = http.tenant.owner
    if http.is_repeated and (known := await store.known(owner, record.id)) is not None:
        record = known  # the gateway that died has stored it, and it may run already
    else:
        await store.create(owner, record, given.own)
    try:
        await queue.push(job_of(owner, record.id))
    except ERRORS as error:
        await store.delete(owner, record)
        raise unavailable("the response cannot be queued", error) from None
    if body.stream:
        await follow(store, http, owner, record)
    else:
        await http.reply(200, msgspec.json.encode(record.resource))
