"""Define what clients send to /v1/files: the form of an upload, and the query of a list."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta
from starlette.datastructures import FormData, UploadFile

from motet_gateway.http.decoding import explain
from motet_gateway.http.fields import Strict
from motet_shared.errors import BadRequest

from .store import StoredFile, new_id

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
MOST_LISTED = 10_000
LONGEST_NAME = 512  # characters of a file's name that are kept
SHORTEST, LONGEST = 3600, 2_592_000  # seconds of `expires_after`


class ExpiresAfter(Strict):
    """When a file expires: `seconds` after it was created."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=SHORTEST, le=LONGEST)]


class FileForm(Strict):
    """Form of POST /v1/files, besides the file."""

    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class FilesQuery(Strict):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MOST_LISTED)] = MOST_LISTED
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


def read_upload(form: FormData, ttl: float) -> tuple[StoredFile, UploadFile]:
    """Return the record of an uploaded file, and the file.

    Raises BadRequest, which names the field. `ttl`: seconds that files are kept at most.
    """
    file: UploadFile | None = None
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name != "file":
                raise BadRequest(f"`{name}` must not be a file; only `file` may be", param=name)
            file = value
        elif name.startswith("expires_after[") and name.endswith("]"):
            after = fields.setdefault("expires_after", {})
            if isinstance(after, dict):
                after[name[len("expires_after[") : -1]] = value
        else:
            fields[name] = value
    given = _form(fields)
    if file is None:
        raise BadRequest("`file` is required; send it as a file", param="file")
    return _record(given, file.filename or "", ttl), file


def _form(fields: dict[str, Any]) -> FileForm:
    try:
        return msgspec.convert(fields, FileForm, strict=False)
    except msgspec.ValidationError as error:
        raise explain(str(error), msgspec.json.encode(fields)) from None


def _record(given: FileForm, filename: str, ttl: float) -> StoredFile:
    now = int(time.time())
    after = ttl if given.expires_after is None else min(given.expires_after.seconds, ttl)
    return StoredFile(
        id=new_id("file-"),
        bytes=0,
        parts=0,
        created_at=now,
        filename=filename[:LONGEST_NAME],
        purpose=given.purpose,
        expires_at=now + int(after),
    )


def purposes() -> tuple[str, ...]:
    """Return the purposes that a file may be uploaded for."""
    return get_args(Purpose)
