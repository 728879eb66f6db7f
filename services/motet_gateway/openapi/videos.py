"""Describe the answers of /v1/videos as structs, for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from motet_gateway.videos.store import Status
from motet_shared.messages import VideoForm

from .answers import Unix

VideoId = Annotated[str, Meta(pattern="^video_[0-9a-f]{24}$")]


class VideoError(Struct):
    code: str
    message: str


class Video(Struct):
    """A video; `seconds` and `size` are "auto" where the model decides and has not yet."""

    id: VideoId
    object: Literal["video"]
    model: str
    prompt: str
    status: Status
    progress: Annotated[int, Meta(ge=0, le=100)]
    seconds: str
    size: str
    seed: int
    output_format: VideoForm
    created_at: Unix
    completed_at: Unix | None
    expires_at: Unix
    remixed_from_video_id: VideoId | None
    error: VideoError | None


class VideoList(Struct):
    object: Literal["list"]
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedVideo(Struct):
    id: VideoId
    object: Literal["video.deleted"]
    deleted: Literal[True]
