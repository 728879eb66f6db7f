"""multipart/form-data: one file and some fields."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from motet_shared.errors import BadRequest, PayloadTooLarge

from .asgi import Exchange, header

_MAX_FIELDS = 64
_MAX_FIELD = 4 << 20  # bytes: sounds of known speakers come as text
_PATIENCE = (256 << 20, 10.0)  # bytes and seconds of a body that is too large


@dataclass(slots=True)
class Form:
    """The file, None if there is none, and the values of each field in order; `name[]` is the field `name`."""

    file: bytes | None = None
    filename: str = ""
    fields: dict[str, list[str]] = field(default_factory=dict)


async def read_form(http: Exchange, limit: int) -> Form:
    """The form of a request. BadRequest for what is no form; PayloadTooLarge beyond `limit` bytes."""
    kind = header(http.scope, b"content-type")
    if not kind.lower().startswith(b"multipart/form-data"):
        raise BadRequest(f"the body must be multipart/form-data, not {kind.decode('latin-1') or 'without a type'}")
    try:
        body = await http.body(limit)
    except PayloadTooLarge:
        await http.discard(*_PATIENCE)
        raise

    async def whole() -> AsyncGenerator[bytes, None]:
        yield body

    headers = Headers(raw=list(http.scope["headers"]))
    parser = MultiPartParser(headers, whole(), max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD)
    try:
        parts = await parser.parse()
    except MultiPartException as error:
        raise BadRequest(f"the form cannot be read: {error.message}") from None
    try:
        return await _read(parts)
    finally:
        await parts.close()


async def _read(parts: FormData) -> Form:
    form = Form()
    for name, value in parts.multi_items():
        if not isinstance(value, UploadFile):
            form.fields.setdefault(name.removesuffix("[]"), []).append(value)
        elif name == "file":
            form.file, form.filename = await value.read(), value.filename or ""
        else:
            raise BadRequest(f"`{name}` must not be a file; only `file` is one", param=name)
    return form
