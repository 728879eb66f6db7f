"""Replace files that items name by their id, as /v1/files returned it, with their text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from motet_gateway.files.store import FileStore
from motet_gateway.http.problems import NotFound
from motet_shared.errors import BadRequest, PayloadTooLarge, Unavailable

from . import items
from .files import LARGE, headed
from .messages import Placed

MOST_FILES = 100  # different files in a conversation


async def with_stored_files(
    placed: Sequence[Placed], files: FileStore | None, owner: str, most: int
) -> list[Placed]:
    """Return items of a conversation in which every stored file is a text.

    most: bytes that all files may have together; one that is named twice counts twice. Raises
    BadRequest for a file that the tenant does not have, PayloadTooLarge beyond `most`,
    UnsupportedParameter for a file that is no text, Unavailable without a store.
    """
    reader = _Reader(files, owner, most)
    return [replace(one, item=await _replaced(one, reader)) for one in placed]


async def _replaced(placed: Placed, reader: _Reader) -> items.Item:
    match placed.item:
        case items.InputMessage(content=list() as parts) as message:
            content = await _parts(parts, f"{placed.param}.content", reader)
            return msgspec.structs.replace(message, content=content)
        case (
            items.FunctionCallOutput(output=list() as parts)
            | items.CustomToolCallOutput(output=list() as parts)
        ) as output:
            made = await _parts(parts, f"{placed.param}.output", reader)
            return msgspec.structs.replace(output, output=made)
    return placed.item


async def _parts(parts: list[items.Part], where: str, reader: _Reader) -> list[items.Part]:
    return [
        await reader.text(part, f"{where}[{index}].file_id", part.file_id)
        if isinstance(part, items.InputFile) and part.file_id is not None
        else part
        for index, part in enumerate(parts)
    ]


class _Reader:
    """Read files of one tenant, each once, up to a number of bytes."""

    def __init__(self, files: FileStore | None, owner: str, most: int):
        self._files, self._owner = files, owner
        self._most = self._left = most
        self._read: dict[str, tuple[str, bytes]] = {}  # name and content by id

    async def text(self, part: items.InputFile, param: str, file_id: str) -> items.InputText:
        if part.file_data is not None:
            raise BadRequest(f"`{param}`: give either `file_data` or `file_id`", param=param)
        stored, content = await self._content(file_id, param)
        self._left -= len(content)
        name = part.filename or stored
        if len(content) > LARGE:
            return items.InputText(text=await asyncio.to_thread(headed, content, name, param))
        return items.InputText(text=headed(content, name, param))

    async def _content(self, file_id: str, param: str) -> tuple[str, bytes]:
        """Return the name and the bytes of a file that still fits."""
        if file_id in self._read:
            self._check(len(self._read[file_id][1]), param)
            return self._read[file_id]
        if self._files is None:
            message = "files are not stored here; the server needs JetStream (motet up --store)"
            raise Unavailable(message, param=param)
        if len(self._read) >= MOST_FILES:
            message = f"`{param}`: a conversation may have {MOST_FILES} stored files"
            raise BadRequest(message, param=param)
        try:
            file = await self._files.get(self._owner, file_id)
            self._check(file.bytes, param)
            content = b"".join([part async for part in self._files.read(self._owner, file)])
        except NotFound:
            message = f"`{param}` {file_id[:80]!r} does not exist; it may have expired"
            raise BadRequest(message, param=param) from None
        self._read[file_id] = (file.filename, content)
        return self._read[file_id]

    def _check(self, size: int, param: str) -> None:
        if size > self._left:
            message = f"`{param}`: the files have more than {self._most} bytes (--max-body)"
            raise PayloadTooLarge(message, param=param)
