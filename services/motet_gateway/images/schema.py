"""Define and validate bodies of /v1/images, and convert them to pipeline requests.

The bodies have OpenAI's fields and extensions.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from motet_gateway.http.decoding import explain
from motet_gateway.http.fields import Int64
from motet_gateway.http.multipart import Form
from motet_gateway.openai.requests import random_seed
from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.messages import Adapter, Control, Draw, ImagePrompt

from .conditions import Controls, IPAdapters
from .options import ImageOptions, check_options

FILES = ("image", "mask")
_LISTS = {"loras", "controlnets", "ip_adapters"}  # fields that a form has as JSON text
_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")
_SEED_MASK = 2**63 - 1
# The image of a failed worker continues from its last checkpoint. Each has some hundred kilobytes,
# so not every step has one.
CHECKPOINT_EVERY = 4  # steps


class ImageBody(ImageOptions, kw_only=True):
    """Fields that image generations and edits share.

    The extensions `controlnets` and `ip_adapters` name images that steer the picture.
    """

    prompt: Annotated[str, Meta(min_length=1)]
    n: Annotated[int, Meta(ge=1, le=10)] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    stream: bool | None = None
    seed: Int64 | None = None
    controlnets: Controls | None = None
    ip_adapters: IPAdapters | None = None


class GenerationBody(ImageBody, kw_only=True):
    """Body of POST /v1/images/generations."""

    moderation: Literal["auto", "low"] | None = None


class EditBody(ImageBody, kw_only=True):
    """Fields of POST /v1/images/edits.

    The extension `strength` is how far the result may depart from the image; 1 is entirely.
    """

    strength: Annotated[float, Meta(gt=0, le=1)] | None = None


def edit_body(form: Form) -> tuple[EditBody, bytes, bytes | None]:
    """Return (fields, image, mask) of a form.

    Raises BadRequest or a subclass, which names the parameter.
    """
    images, masks = form.files.get("image", []), form.files.get("mask", [])
    if len(images) != 1:
        message = f"`image`: {len(images)} files; send exactly one, as a file of the form"
        raise BadRequest(message, param="image")
    if len(masks) > 1:
        raise BadRequest(f"`mask`: {len(masks)} files; send at most one", param="mask")
    return _converted(form), images[0], masks[0] if masks else None


def _converted(form: Form) -> EditBody:
    """Convert the texts of a form to the types of the fields."""
    fields: dict[str, Any] = {name: values[-1] for name, values in form.fields.items()}
    try:
        return msgspec.convert(fields | _listed(fields), EditBody, strict=False)
    except msgspec.ValidationError as error:
        raise explain(str(error), msgspec.json.encode(fields)) from None


def _listed(fields: dict[str, Any]) -> dict[str, Any]:
    """Decode the form fields that hold JSON."""
    found = {}
    for name in _LISTS & fields.keys():
        try:
            found[name] = msgspec.json.decode(fields[name])
        except msgspec.DecodeError as error:
            message = (
                f"`{name}`: is not JSON ({error});"
                ' in a form, send a list such as [{"name": "ink"}]'
            )
            raise BadRequest(message, param=name) from None
    return found


def check(body: ImageBody, *, kept: bool) -> None:
    """Raise BadRequest or UnsupportedParameter for options that are not possible here.

    `kept` is True if the server can store images for URLs.
    """
    if body.response_format == "url" and (body.stream or not kept):
        why = (
            "a stream cannot return URLs"
            if body.stream
            else "this server stores no images (motet up --store FOLDER)"
        )
        message = f"`response_format` url: {why}; send b64_json"
        raise UnsupportedParameter(message, param="response_format")
    check_options(body)
    if body.stream and (body.n or 1) > 1:
        raise BadRequest(
            f"`n` {body.n}: a stream has one image; leave out `stream` or `n`", param="n"
        )
    if body.partial_images and not body.stream:
        raise BadRequest("`partial_images` needs `stream`", param="partial_images")


def requests(body: ImageBody, model: str, request_id: str) -> list[Draw]:
    """Return one request per image.

    The seed is fixed here, so that an image that fails over stays the same.
    """
    base = msgspec.structs.replace(
        image_request(body, model, request_id),
        prompt=body.prompt,
        strength=body.strength if isinstance(body, EditBody) else None,
        controls=[
            Control(one.name, None, one.scale, one.start, one.end) for one in body.controlnets or []
        ],
        image_prompts=[ImagePrompt(one.name, None, one.scale) for one in body.ip_adapters or []],
    )
    seed = random_seed() if body.seed is None else body.seed
    return [
        msgspec.structs.replace(base, seed=(seed + index) & _SEED_MASK)
        for index in range(body.n or 1)
    ]


def image_request(options: ImageOptions, model: str, request_id: str) -> Draw:
    """Return a request with the image options but without prompt and seed."""
    width, height = size_of(options.size)
    return Draw(
        model=model,
        prompt="",
        negative_prompt=options.negative_prompt,
        width=width,
        height=height,
        steps=options.steps or 0,
        scheduler=options.scheduler,
        guidance_scale=options.guidance_scale,
        loras=[Adapter(lora.name, lora.scale) for lora in options.loras or []],
        previews=options.partial_images or 0,
        checkpoint_every=CHECKPOINT_EVERY,
        format=options.output_format or "png",
        quality=90 if options.output_compression is None else max(options.output_compression, 1),
        request_id=request_id,
    )


def size_of(size: str | None) -> tuple[int, int]:
    """Return (width, height) in pixels; zeros mean the model's default."""
    if size is None or size == "auto":
        return 0, 0
    match = _SIZE.fullmatch(size)
    if match is None:
        raise BadRequest(
            f"`size` {size[:40]!r} must be auto or WIDTHxHEIGHT in pixels, such as 512x512",
            param="size",
        )
    return int(match[1]), int(match[2])
