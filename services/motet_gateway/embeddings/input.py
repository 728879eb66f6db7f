"""Read the input of POST /v1/embeddings: texts, token ids and pictures, in several clients' shapes.

OpenAI's texts and token ids; parts with `text` or `image_url`, as in chats; Jina's `{"text": …}` and
`{"image": …}`; and vLLM's `messages` with one part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from motet_gateway.context import GatewayContext
from motet_gateway.http.fields import Count, Strict
from motet_gateway.openai.chat_images import Source, read_image
from motet_gateway.openai.schema import ImageUrl
from motet_pipelines.chat.vision import InputMedia
from motet_shared.errors import BadRequest

MAX_PICTURES = 64  # of a request
_BASE64 = "data:image/png;base64,"


class InputPart(Strict):
    """One text or one picture. `image` is Jina's: a URL, a data URL or base64."""

    type: Literal["text", "image_url"] | None = None
    text: str | None = None
    image_url: ImageUrl | str | None = None
    image: str | None = None


class InputMessage(Strict):
    """A message of vLLM's chat embeddings; all messages together have one part."""

    role: Literal["user"]
    content: str | list[InputPart]


Entry = str | Count | list[Count] | InputPart


@dataclass(slots=True)
class EmbeddingInput:
    """Hold the texts and the pictures of a request, and the order of both in it.

    order: for each entry, its place among the texts, then the pictures.
    """

    texts: list[str | list[int]] = field(default_factory=list)
    pictures: list[Source] = field(default_factory=list)
    order: list[int] = field(default_factory=list)

    async def files(self, service: GatewayContext) -> list[InputMedia]:
        """Read the pictures' files. Raises BadRequest, PayloadTooLarge or UnsupportedParameter."""
        return [
            InputMedia(await read_image(source, service.config), 0, source.param)
            for source in self.pictures
        ]


def read_input(
    given: str | list[Entry] | None, messages: list[InputMessage] | None, most: int
) -> EmbeddingInput:
    """Return the entries of a request.

    Raises BadRequest if there are none or more than `most`, if token ids are mixed with texts, or if
    a part is not one text or picture.
    """
    if (given is None) == (messages is None):
        raise BadRequest("`input`: give either `input` or `messages`", param="input")
    if messages is not None:
        return _divided(_of_messages(messages), "messages[0].content")
    if isinstance(given, str):
        return _divided([given], "input")
    entries: list[Entry] = given or []
    if not entries:
        raise BadRequest("`input` is empty; give a text, or a list of texts", param="input")
    numbers = [entry for entry in entries if isinstance(entry, int)]
    if numbers:
        if len(numbers) < len(entries):
            raise BadRequest("`input` mixes token ids with texts; give either", param="input")
        return _divided([numbers], "input")
    if len(entries) > most:
        message = (
            f"`input` has {len(entries)} texts; at most {most} are taken at a time (--max-inputs)"
        )
        raise BadRequest(message, param="input")
    return _divided([entry for entry in entries if not isinstance(entry, int)], "input")


def _of_messages(messages: list[InputMessage]) -> list[str | list[int] | InputPart]:
    parts: list[str | list[int] | InputPart] = []
    for message in messages:
        parts += [message.content] if isinstance(message.content, str) else message.content
    if len(parts) != 1:
        raise BadRequest(
            f"`messages` have {len(parts)} parts; give one text or picture, or use `input`",
            param="messages",
        )
    return parts


def _divided(entries: list[str | list[int] | InputPart], param: str) -> EmbeddingInput:
    found = EmbeddingInput()
    places: list[tuple[bool, int]] = []
    for index, entry in enumerate(entries):
        part = _source(entry, f"{param}[{index}]") if isinstance(entry, InputPart) else entry
        if isinstance(part, Source):
            places.append((True, len(found.pictures)))
            found.pictures.append(part)
        else:
            places.append((False, len(found.texts)))
            found.texts.append(part)
    if len(found.pictures) > MAX_PICTURES:
        raise BadRequest(
            f"`{param}` has {len(found.pictures)} pictures; at most {MAX_PICTURES} are taken at a "
            "time",
            param=param,
        )
    found.order = [place + len(found.texts) * is_picture for is_picture, place in places]
    return found


def _source(part: InputPart, param: str) -> str | Source:
    """Return the text or the picture of a part. Raises BadRequest unless there is exactly one."""
    given = [one for one in (part.text, part.image_url, part.image) if one is not None]
    named = {"text": part.text, "image_url": part.image_url}
    if len(given) != 1 or (part.type is not None and named[part.type] is None):
        raise BadRequest(
            f"`{param}` must have one of text, image_url and image; give one", param=param
        )
    if part.text is not None:
        return part.text
    if isinstance(part.image_url, ImageUrl):
        return Source(f"{param}.image_url", part.image_url)
    name = "image_url" if part.image is None else "image"
    url = str(given[0])
    if part.image is not None and not url.lower().startswith(("data:", "http:", "https:")):
        url = _BASE64 + url
    return Source(f"{param}.{name}", ImageUrl(url=url), is_url=True)
