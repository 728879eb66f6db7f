"""Serve /v1/batches: create, list, retrieve and cancel."""

from __future__ import annotations

import time

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.files.endpoints import NO_STORE, files_of, listed
from motet_gateway.http.decoding import Decoder
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.json_size import check_json
from motet_gateway.http.problems import NotFound, QuotaExceeded
from motet_gateway.http.query import page_of, query_of
from motet_shared.errors import BadRequest, Unavailable

from .queue import BatchQueue, QueuedBatch
from .schema import BatchBody, BatchesQuery, window_seconds
from .store import MOST, OVER, Batch, BatchStore

_MOST_BODY = 64 << 10  # bytes
_decoder = Decoder(BatchBody)


async def create_batch(service: GatewayContext, http: Exchange) -> None:
    """Queue a batch; its file is checked when it begins."""
    data = await http.body(min(_MOST_BODY, service.config.max_body))
    check_json(data, http.tenant)
    body = _decoder.decode(data)
    service.check_open()
    batches, queue = _stores(service)
    owner = http.tenant.owner
    await _check_file(service, owner, body.input_file_id)
    if len(await batches.ids(owner)) >= MOST:
        raise QuotaExceeded(f"this key has {MOST} batches, the most that are kept; try later")
    window = min(window_seconds(body.completion_window), int(service.config.file_ttl))
    after = body.output_expires_after
    batch = Batch.new(
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        expires_at=int(time.time()) + window,
        metadata=body.metadata,
        output_ttl=0 if after is None else after.seconds,
    )
    await files_of(service).check_room(owner, _MOST_BODY)  # of the record
    await queue.add(QueuedBatch(owner, batch.id))  # first: a batch that is stored is in the queue
    await batches.save(owner, batch)
    queue.added.set()
    await http.reply(200, msgspec.json.encode(batch.as_dict()))


async def _check_file(service: GatewayContext, owner: str, file_id: str) -> None:
    """Raise BadRequest unless the tenant has such a file, for batches."""
    try:
        file = await files_of(service).get(owner, file_id)
    except NotFound as error:
        raise BadRequest(f"`input_file_id`: {error.message}", param="input_file_id") from None
    if file.purpose != "batch":
        message = f"`input_file_id`: the purpose of {file_id!r} is {file.purpose!r}, not 'batch'"
        raise BadRequest(f"{message}; upload it again", param="input_file_id")


async def list_batches(service: GatewayContext, http: Exchange) -> None:
    """Answer a page of the tenant's batches, the newest first."""
    query = query_of(http, BatchesQuery)
    batches, _ = _stores(service)
    owner = http.tenant.owner
    ids = page_of(await batches.ids(owner), query.after, newest_first=True)
    page = [await batches.get(owner, one) for one in ids[: query.limit + 1]]
    await http.reply(200, listed([batch.as_dict() for batch in page], query.limit))


async def get_batch(service: GatewayContext, http: Exchange) -> None:
    """Answer where a batch stands."""
    batches, _ = _stores(service)
    batch = await batches.get(http.tenant.owner, http.scope["path_params"]["batch_id"])
    await http.reply(200, msgspec.json.encode(batch.as_dict()))


async def cancel_batch(service: GatewayContext, http: Exchange) -> None:
    """Cancel a batch; without effect on one that is over."""
    batches, _ = _stores(service)
    owner = http.tenant.owner
    batch = await batches.get(owner, http.scope["path_params"]["batch_id"])
    if batch.status not in OVER:
        await batches.cancel(owner, batch.id)
        batch = await batches.get(owner, batch.id)
    await http.reply(200, msgspec.json.encode(batch.as_dict()))


def _stores(service: GatewayContext) -> tuple[BatchStore, BatchQueue]:
    if service.batches is None or service.batch_queue is None:
        raise Unavailable(NO_STORE)
    return service.batches, service.batch_queue
