"""Parse multipart/form-data requests into files and fields."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from motet_gateway.openai.hints import Surface
from motet_shared.errors import BadRequest, PayloadTooLarge

from .asgi import header
from .exchange import Exchange

_MAX_FIELDS = 64
_MAX_SHORT_FIELD = 4096  # bytes of a field of a form that is not held in memory
_MAX_FIELD = 4 << 20  # bytes; recordings of known speakers are sent as text
_PIECE = 64 << 10  # bytes of a form that are parsed at a time
_PATIENCE = (256 << 20, 10.0)  # bytes and seconds of an oversized body to discard


@dataclass(slots=True)
class Form:
    """A parsed form.

    `file` is the content of the file named `file`, or None. `files` and `fields` hold all values by
    name, in order; `name[]` is stored as `name`.
    """

    file: bytes | None = None
    filename: str = ""
    files: dict[str, list[bytes]] = field(default_factory=dict)
    fields: dict[str, list[str]] = field(default_factory=dict)


async def read_form(
    http: Exchange, limit: int, files: Sequence[str] = ("file",), surface: Surface | None = None
) -> Form:
    """Return the form of a request, in which only the names in `files` may be files.

    There may be at most as many files as `files` has names. Hints of `surface` are removed from the
    form. Raises BadRequest if the body is not a valid form, PayloadTooLarge if it exceeds `limit`
    bytes.
    """
    _check_type(http)
    try:
        body = await http.body(limit)
    except PayloadTooLarge:
        await http.discard(*_PATIENCE)
        raise

    async def pieces() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), _PIECE):
            yield body[start : start + _PIECE]
            await asyncio.sleep(0)  # for other tasks: near-boundaries are parsed byte by byte

    headers = Headers(raw=list(http.scope["headers"]))
    parser = MultiPartParser(
        headers, pieces(), max_files=len(files), max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD
    )
    try:
        parts = await parser.parse()
    except MultiPartException as error:
        raise BadRequest(f"the form cannot be read: {error.message}") from None
    try:
        form = await _read(parts, files)
    finally:
        await parts.close()
    if surface is not None and (ignored := http.hints(surface)) is not None:
        ignored.prune_form(form.fields)
    return form


@asynccontextmanager
async def open_form(http: Exchange, limit: int, setting: str) -> AsyncIterator[FormData]:
    """Return the form of a request with at most one file, which is read from disk if it is large.

    Raises like `read_form`; `setting` is the flag that sets `limit`. The file is closed at the end.
    """
    _check_type(http)
    parser = MultiPartParser(
        Headers(raw=list(http.scope["headers"])),
        http.body_parts(limit, setting),
        max_files=1,
        max_fields=_MAX_FIELDS,
        max_part_size=_MAX_SHORT_FIELD,
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise BadRequest(f"the form cannot be read: {error.message}") from None
    except PayloadTooLarge:
        await http.discard(*_PATIENCE)
        raise
    try:
        yield form
    finally:
        await form.close()


def _check_type(http: Exchange) -> None:
    kind = header(http.scope, b"content-type")
    if not kind.lower().startswith(b"multipart/form-data"):
        raise BadRequest(
            f"the body must be multipart/form-data, not {kind.decode('latin-1') or 'without a type'}"
        )


async def _read(parts: FormData, files: Sequence[str]) -> Form:
    form = Form()
    for key, value in parts.multi_items():
        name = key.removesuffix("[]")
        if not isinstance(value, UploadFile):
            form.fields.setdefault(name, []).append(value)
            continue
        if name not in files:
            known = " and ".join(f"`{file}`" for file in files)
            raise BadRequest(f"`{name}` must not be a file; only {known} may be", param=name)
        data = await value.read()
        form.files.setdefault(name, []).append(data)
        if name == "file":
            form.file, form.filename = data, value.filename or ""
    return form
