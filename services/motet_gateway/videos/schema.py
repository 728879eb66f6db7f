"""Define what clients send to /v1/videos, as JSON or as a form."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from motet_gateway.http.asgi import header
from motet_gateway.http.decoding import Decoder, explain
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.fields import Int64, Strict
from motet_gateway.http.json_size import check_json
from motet_gateway.http.multipart import read_form
from motet_gateway.images.conditions import file_of
from motet_gateway.images.schema import size_of
from motet_shared.errors import BadRequest
from motet_shared.messages import VideoForm

MOST_LISTED = 100
_IMAGE = "input_reference"
_URL = f"{_IMAGE}[image_url]"  # how OpenAI's client writes it in a form
_MOST_SECONDS = 600.0
_LONGEST = 20_000  # characters of a prompt
_Prompt = Annotated[str, Meta(min_length=1, max_length=_LONGEST)]


class ImageReference(Strict, kw_only=True):
    """The image that a video begins with, as a data URL."""

    image_url: Annotated[str, Meta(min_length=1)]


class VideoBody(Strict, kw_only=True):
    """Body of POST /v1/videos.

    `seed`, `steps`, `guidance_scale`, `negative_prompt` and `output_format` are extensions. `seconds` may be any
    number; the video has the nearest length that its model can make.
    """

    prompt: _Prompt
    model: str = ""
    seconds: Annotated[str, Meta(pattern=r"^[0-9]{1,4}(\.[0-9]{1,3})?$")] | float | None = None
    size: str | None = None
    seed: Int64 | None = None
    steps: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    negative_prompt: Annotated[str, Meta(max_length=_LONGEST)] = ""
    output_format: VideoForm = "mp4"
    input_reference: ImageReference | None = None


class RemixBody(Strict, kw_only=True):
    """Body of POST /v1/videos/{video_id}/remix."""

    prompt: _Prompt


class VideosQuery(Strict):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MOST_LISTED)] = 20
    order: Literal["asc", "desc"] = "desc"


class ContentQuery(Strict):
    variant: Literal["video", "thumbnail"] = "video"


_json = Decoder(VideoBody)


async def read_body(http: Exchange, most: int, most_image: int) -> tuple[VideoBody, bytes]:
    """Return the fields of a request and the image that the video begins with, b"" without one.

    `most`, `most_image`: bytes of a request and of an image. Raises BadRequest or a subclass, which
    names the field.
    """
    if header(http.scope, b"content-type").lower().startswith(b"multipart/"):
        body, image = await _read_form(http, most)
    else:
        data = await http.body(most)
        check_json(data, http.tenant, "prompt")
        body, image = _json.decode(data, http.hints("videos")), b""
    if body.input_reference is not None:
        image = file_of(body.input_reference.image_url, f"{_IMAGE}.image_url", most_image)
    if len(image) > most_image:
        message = f"`{_IMAGE}`: the file has more than {most_image} bytes (--max-image)"
        raise BadRequest(message, param=_IMAGE)
    size_of(body.size)
    seconds_of(body)
    return body, image


async def _read_form(http: Exchange, most: int) -> tuple[VideoBody, bytes]:
    form = await read_form(http, most, (_IMAGE,), "videos")
    fields: dict[str, Any] = {name: values[-1] for name, values in form.fields.items()}
    if (url := fields.pop(_URL, None)) is not None:
        fields[_IMAGE] = {"image_url": url}
    elif isinstance(fields.get(_IMAGE), str):  # as JSON text
        fields[_IMAGE] = _decoded(fields[_IMAGE])
    try:
        body = msgspec.convert(fields, VideoBody, strict=False)
    except msgspec.ValidationError as error:
        raise explain(str(error), msgspec.json.encode(fields)) from None
    image = form.files.get(_IMAGE, [b""])[0]
    if _IMAGE in form.files and not image:
        raise BadRequest(f"`{_IMAGE}`: the file is empty; send an image", param=_IMAGE)
    return body, image


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        message = f"`{_IMAGE}`: is not JSON ({error}); send an image as a file"
        raise BadRequest(message, param=_IMAGE) from None


def seconds_of(body: VideoBody) -> float:
    """Return the length that is asked for; 0: the model's default. Raises BadRequest."""
    seconds = float(body.seconds or 0)
    if (body.seconds is not None and not 0 < seconds <= _MOST_SECONDS) or math.isnan(seconds):
        message = f"`seconds`: {seconds:g}; give more than 0, at most {_MOST_SECONDS:g}"
        raise BadRequest(message, param="seconds")
    return seconds
