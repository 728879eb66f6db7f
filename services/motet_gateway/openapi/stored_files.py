"""Describe the answers of /v1/files and /v1/batches as structs, for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from motet_gateway.batches.store import Status

from .answers import Count, Unix

FileId = Annotated[str, Meta(pattern="^file-[0-9a-f]{24}$")]
BatchId = Annotated[str, Meta(pattern="^batch_[0-9a-f]{24}$")]


class File(Struct):
    """A stored file; it can be read until `expires_at`."""

    id: FileId
    object: Literal["file"]
    bytes: Count
    created_at: Unix
    expires_at: Unix
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(Struct):
    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct):
    id: FileId
    object: Literal["file"]
    deleted: Literal[True]


class LineError(Struct):
    """An error of the input file; `line` counts from 1."""

    code: str
    message: str
    line: int | None
    param: str | None


class LineErrors(Struct):
    object: Literal["list"]
    data: list[LineError]


class RequestCounts(Struct):
    total: Count
    completed: Count
    failed: Count


class Batch(Struct):
    """A batch; the files of its results exist once it is over and has some."""

    id: BatchId
    object: Literal["batch"]
    endpoint: str
    errors: LineErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: FileId | None
    error_file_id: FileId | None
    created_at: Unix
    expires_at: Unix
    in_progress_at: Unix | None
    finalizing_at: Unix | None
    failed_at: Unix | None
    completed_at: Unix | None
    expired_at: Unix | None
    cancelling_at: Unix | None
    cancelled_at: Unix | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Struct):
    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
