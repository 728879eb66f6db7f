"""What may be asked of /v1/images: OpenAI's fields and ours, checked, and the request for the pipeline."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.messages import Draw

from .decoding import explain
from .multipart import Form
from .schema import Int64, Strict
from .wire import fresh_seed

FILES = ("image", "mask")
_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")
_SEED_MASK = 2**63 - 1
# A dead worker's picture goes on from the last of these: each is some hundred kilobytes, so not every step has one.
_CHECKPOINT_EVERY = 4  # steps


class ImageBody(Strict, kw_only=True):
    """What both endpoints know. `seed`, `steps`, `guidance_scale`, `negative_prompt` and `progress` are ours."""

    prompt: Annotated[str, Meta(min_length=1)]
    model: str = ""
    n: Annotated[int, Meta(ge=1, le=10)] | None = None
    size: str | None = None
    quality: Literal["auto", "standard", "low", "medium", "high", "hd"] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    background: Literal["auto", "opaque", "transparent"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=8)] | None = None
    seed: Int64 | None = None
    steps: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    negative_prompt: str = ""
    progress: bool = False  # an event per step, beside OpenAI's


class GenerationBody(ImageBody, kw_only=True):
    """POST /v1/images/generations."""

    moderation: Literal["auto", "low"] | None = None


class EditBody(ImageBody, kw_only=True):
    """The fields of POST /v1/images/edits; `strength` is ours: how far from the image, 1 is all the way."""

    strength: Annotated[float, Meta(gt=0, le=1)] | None = None


def edit_body(form: Form) -> tuple[EditBody, bytes, bytes | None]:
    """(fields, image, mask) of a form. BadRequest and its kinds name the parameter."""
    images, masks = form.files.get("image", []), form.files.get("mask", [])
    if len(images) != 1:
        message = f"`image`: {len(images)} files; send one, as a file of the form: one picture is changed at a time"
        raise BadRequest(message, param="image")
    if len(masks) > 1:
        raise BadRequest(f"`mask`: {len(masks)} files; send one, or none", param="mask")
    return _converted(form), images[0], masks[0] if masks else None


def _converted(form: Form) -> EditBody:
    """The texts of a form as the types of the fields."""
    fields: dict[str, Any] = {name: values[-1] for name, values in form.fields.items()}
    try:
        return msgspec.convert(fields, EditBody, strict=False)
    except msgspec.ValidationError as error:
        raise explain(str(error), msgspec.json.encode(fields)) from None


def check(body: ImageBody, *, kept: bool) -> None:
    """Raises for what is valid, but not to be had here. `kept`: whether pictures can be kept for a while."""
    if body.response_format == "url" and (body.stream or not kept):
        why = "a stream has none" if body.stream else "pictures are not kept here (motet up --store FOLDER)"
        message = f"`response_format` url: {why}; ask for b64_json"
        raise UnsupportedParameter(message, param="response_format")
    if body.background == "transparent":
        raise UnsupportedParameter("`background` transparent: pictures here are opaque", param="background")
    if body.quality in ("low", "high", "hd"):
        message = f"`quality` {body.quality}: choose a number of `steps` instead"
        raise UnsupportedParameter(message, param="quality")
    if body.stream and (body.n or 1) > 1:
        raise BadRequest(f"`n` {body.n}: one picture is streamed at a time; leave `stream` or `n` out", param="n")
    if body.partial_images and not body.stream:
        raise BadRequest("`partial_images` needs `stream`", param="partial_images")


def requests(body: ImageBody, model: str, request_id: str) -> list[Draw]:
    """One request per picture. The seed is fixed here, so that a picture that moves stays the same."""
    width, height = _size(body.size)
    strength = body.strength if isinstance(body, EditBody) else None
    seed = fresh_seed() if body.seed is None else body.seed
    return [
        Draw(
            model=model,
            prompt=body.prompt,
            negative_prompt=body.negative_prompt,
            width=width,
            height=height,
            steps=body.steps or 0,
            guidance_scale=body.guidance_scale,
            seed=(seed + index) & _SEED_MASK,
            strength=strength,
            previews=body.partial_images or 0,
            checkpoint_every=_CHECKPOINT_EVERY,
            format=body.output_format or "png",
            quality=90 if body.output_compression is None else max(body.output_compression, 1),
            request_id=request_id,
        )
        for index in range(body.n or 1)
    ]


def _size(size: str | None) -> tuple[int, int]:
    """(width, height); zeros: the model's own."""
    if size is None or size == "auto":
        return 0, 0
    match = _SIZE.fullmatch(size)
    if match is None:
        raise BadRequest(f"`size` {size[:40]!r} is not auto, nor like 512x512 (width x height)", param="size")
    return int(match[1]), int(match[2])
