"""Serve /v1/files: upload, list, retrieve, read and delete."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.datastructures import UploadFile

from motet_gateway.context import GatewayContext
from motet_gateway.http.asgi import header
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.multipart import open_form
from motet_gateway.http.query import page_of, query_of
from motet_shared.errors import Unavailable

from .schema import FilesQuery, read_upload
from .store import PART, FileStore, StoredFile

NO_STORE = "files are not stored here; the server needs JetStream (motet up --store FOLDER)"
_FILE = [
    (b"content-type", b"application/octet-stream"),
    (b"content-disposition", b"attachment"),
    (b"x-content-type-options", b"nosniff"),
]


def files_of(service: GatewayContext) -> FileStore:
    """Return the store of files; raises Unavailable without one."""
    if service.files is None:
        raise Unavailable(NO_STORE)
    return service.files


async def upload_file(service: GatewayContext, http: Exchange) -> None:
    """Store a file."""
    files, owner, most = files_of(service), http.tenant.owner, service.config.max_file
    service.check_open()
    length = header(http.scope, b"content-length")
    await files.check_count(owner)
    await files.check_room(owner, min(int(length), most) if length.isdigit() else 0)
    async with open_form(http, most, "--max-file") as form:
        file, upload = read_upload(form, files.ttl)
        async with files.turn(owner):  # several uploads may end at once
            await files.check_count(owner)
            await files.check_room(owner, upload.size or 0)
            stored = await files.write(owner, file, _parts(upload))
    await http.reply(200, msgspec.json.encode(stored.as_dict()))


async def _parts(upload: UploadFile) -> AsyncGenerator[bytes, None]:
    while part := await upload.read(PART):
        yield part


async def list_files(service: GatewayContext, http: Exchange) -> None:
    """Answer a page of the tenant's files, the newest first unless `order` is `asc`."""
    files, owner = files_of(service), http.tenant.owner
    query = query_of(http, FilesQuery)
    ids = page_of(await files.ids(owner), query.after, newest_first=query.order == "desc")
    page: list[StoredFile] = []
    while ids and len(page) <= query.limit:
        some, ids = ids[: query.limit + 1], ids[query.limit + 1 :]
        found = await files.found(owner, some)
        page += [file for file in found if query.purpose in (None, file.purpose)]
    await http.reply(200, listed([file.as_dict() for file in page], query.limit))


def listed(found: list[dict[str, Any]], limit: int) -> bytes:
    """Return a page as JSON: the first `limit` of `found`, which has more if there are more."""
    page = found[:limit]
    answer = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(found) > limit,
    }
    return msgspec.json.encode(answer)


async def get_file(service: GatewayContext, http: Exchange) -> None:
    """Answer what is known of a file."""
    _, file = await _stored(service, http)
    await http.reply(200, msgspec.json.encode(file.as_dict()))


async def get_file_content(service: GatewayContext, http: Exchange) -> None:
    """Send a file, part by part, as fast as the client reads."""
    files, file = await _stored(service, http)
    http.content = _FILE
    async with http.while_connected():
        async for part in files.read(http.tenant.owner, file):
            await http.write(part)
        await http.finish(b"")


async def delete_file(service: GatewayContext, http: Exchange) -> None:
    """Delete a file."""
    files, file = await _stored(service, http)
    await files.delete(http.tenant.owner, file)
    answer = {"id": file.id, "object": "file", "deleted": True}
    await http.reply(200, msgspec.json.encode(answer))


async def _stored(service: GatewayContext, http: Exchange) -> tuple[FileStore, StoredFile]:
    files = files_of(service)
    return files, await files.get(http.tenant.owner, http.scope["path_params"]["file_id"])
