"""Serve /v1/videos: create, list, retrieve, delete, read and remix."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.files.endpoints import listed
from motet_gateway.files.store import StoredFile, new_id
from motet_gateway.http.decoding import Decoder
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.json_size import check_json
from motet_gateway.http.problems import NotFound, QuotaExceeded
from motet_gateway.http.query import page_of, query_of
from motet_gateway.openai.aliases import VIDEO, model_of
from motet_gateway.openai.requests import random_seed
from motet_shared.errors import BadRequest, MotetError, Unavailable

from .jobs import VideoJobs
from .schema import ContentQuery, RemixBody, VideosQuery, read_body, seconds_of
from .store import MOST, Video

_NO_STORE = "videos are not stored here; the server needs JetStream (motet up --store FOLDER)"
_MOST_REMIX = 256 << 10  # bytes
_PREVIEW = "image/webp"  # media type
_SEED_MASK = 2**63 - 1
_remix = Decoder(RemixBody)


def jobs_of(service: GatewayContext) -> VideoJobs:
    """Return the gateway's video jobs; raises Unavailable without a store."""
    if service.videos is None:
        raise Unavailable(_NO_STORE)
    return service.videos


async def create_video(service: GatewayContext, http: Exchange) -> None:
    """Queue a video."""
    jobs, config = jobs_of(service), service.config
    service.check_open()
    body, image = await read_body(http, config.max_upload, config.max_image)
    model = model_of(service.bus.directory, VIDEO, body.model)
    now = int(time.time())
    video = Video(
        id=new_id("video_"),
        model=model,
        prompt=body.prompt,
        negative_prompt=body.negative_prompt,
        seconds=seconds_of(body),
        size=body.size or "auto",
        seed=(random_seed() if body.seed is None else body.seed) & _SEED_MASK,
        steps=body.steps or 0,
        guidance_scale=body.guidance_scale,
        format=body.output_format,
        created_at=now,
        expires_at=now + int(jobs.store.ttl),
    )
    await _submit(service, http, video, image)


async def remix_video(service: GatewayContext, http: Exchange) -> None:
    """Queue a video with the noise and the settings of another one, and another prompt."""
    jobs = jobs_of(service)
    service.check_open()
    data = await http.body(min(_MOST_REMIX, service.config.max_body))
    check_json(data, http.tenant, "prompt")
    body = _remix.decode(data)
    source = await _video(service, http)
    if source.status != "completed":
        message = f"video {source.id!r} is {source.status}; remix one that is completed"
        raise BadRequest(message, param="video_id")
    owner, now = http.tenant.owner, int(time.time())
    image = b"" if source.image is None else await jobs.store.read(owner, source.image)
    video = msgspec.structs.replace(
        source,
        id=new_id("video_"),
        prompt=body.prompt,
        created_at=now,
        expires_at=now + int(jobs.store.ttl),
        completed_at=None,
        status="queued",
        progress=0,
        remixed_from=source.id,
        image=None,
        content=None,
        preview=None,
    )
    await _submit(service, http, video, image)


async def _submit(service: GatewayContext, http: Exchange, video: Video, image: bytes) -> None:
    """Charge and queue a video, which counts as an image for each second that is asked for."""
    jobs, owner = jobs_of(service), http.tenant.owner
    count = max(math.ceil(video.seconds), 1)
    with await http.tenant.take(images=count) as ticket:
        async with jobs.store.files.turn(owner):
            await _check_room(service, owner)
            await jobs.store.files.check_room(owner, len(image) + 1)
            if image:
                video.image = await jobs.store.write(owner, "input_reference", image)
            try:
                await jobs.submit(owner, video)
                await _check_open(service, owner, with_new=1)  # another gateway may have taken one
            except BaseException:
                with suppress(MotetError):  # it expires
                    await asyncio.shield(jobs.store.delete(owner, video))
                raise
        ticket.images.use(count)
    await http.reply(200, msgspec.json.encode(video.as_dict()))


async def _check_room(service: GatewayContext, owner: str) -> None:
    """Raise QuotaExceeded if the tenant has as many videos, or open ones, as it may have."""
    if len(await jobs_of(service).store.ids(owner)) >= MOST:
        raise QuotaExceeded(f"this key has {MOST} videos, the most that are kept; delete some")
    await _check_open(service, owner)


async def _check_open(service: GatewayContext, owner: str, *, with_new: int = 0) -> None:
    """Raise QuotaExceeded if the tenant has no room for an open video, or has too many.

    with_new: 1 if the new video is counted already.
    """
    store, most = jobs_of(service).store, service.config.open_videos
    if len(await store.ids(owner, "open")) >= most + with_new:
        message = f"{most} videos of this key wait or are made, the most allowed (--open-videos)"
        raise QuotaExceeded(f"{message}; wait for one, or delete one")


async def list_videos(service: GatewayContext, http: Exchange) -> None:
    """Answer a page of the tenant's videos, the newest first unless `order` is `asc`."""
    query = query_of(http, VideosQuery)
    store, owner = jobs_of(service).store, http.tenant.owner
    ids = page_of(await store.ids(owner), query.after, newest_first=query.order == "desc")
    page: list[Video] = []
    for one in ids:
        with suppress(NotFound):  # it was deleted meanwhile
            page.append(await store.get(owner, one))
        if len(page) > query.limit:
            break
    await http.reply(200, listed([video.as_dict() for video in page], query.limit))


async def get_video(service: GatewayContext, http: Exchange) -> None:
    """Answer where a video stands."""
    video = await _video(service, http)
    await http.reply(200, msgspec.json.encode(video.as_dict()))


async def delete_video(service: GatewayContext, http: Exchange) -> None:
    """Delete a video; one that is being made is made no further."""
    video = await _video(service, http)
    await jobs_of(service).store.delete(http.tenant.owner, video)
    answer = {"id": video.id, "object": "video.deleted", "deleted": True}
    await http.reply(200, msgspec.json.encode(answer))


async def get_video_content(service: GatewayContext, http: Exchange) -> None:
    """Send a video, or its newest preview, part by part, as fast as the client reads."""
    variant = query_of(http, ContentQuery).variant
    video = await _video(service, http)
    file: StoredFile | None = video.content if variant == "video" else video.preview
    if file is None:
        raise NotFound(f"video {video.id!r} is {video.status} and has no {variant}; ask later")
    http.content = [
        (b"content-type", (f"video/{video.format}" if variant == "video" else _PREVIEW).encode()),
        (b"x-content-type-options", b"nosniff"),
    ]
    async with http.while_connected():
        async for part in jobs_of(service).store.files.read(http.tenant.owner, file):
            await http.write(part)
        await http.finish(b"")


async def _video(service: GatewayContext, http: Exchange) -> Video:
    video_id = http.scope["path_params"]["video_id"]
    return await jobs_of(service).store.get(http.tenant.owner, video_id)
