"""Write pictures into messages as data URLs, and find out whether a server's model takes any."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from motet_engines.pictures import Picture
from motet_shared.errors import BadRequest, MotetError, Overloaded
from motet_shared.messages import Chat

from .connection import Connection
from .dialects import ServerDialect
from .server import Server

log = logging.getLogger(__name__)

_LOW_DETAIL = 512 * 512  # pixels; OpenAI's `detail: low`
# 56 by 56 grey pixels, of which every model makes at least one patch.
_GREY = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAADgAAAA4CAIAAAAn5KxJAAAAP0lEQVR42u3OMQ0AAAwD"
    "oEqv9B5TsQQUkD4RUVFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRUVHRM4zeYQ8NTLd/AAAAAElFTkSuQm"
    "CC"
)


def messages_of(
    chat: Chat, pictures: Sequence[Picture], dialect: ServerDialect
) -> list[dict[str, Any]]:
    """Return the messages of a chat with its pictures. Raises BadRequest for a file that is none."""
    if not pictures:
        return chat.messages
    left = iter(pictures)
    return [
        {**message, "content": _content(message.get("content"), left, dialect)}
        for message in chat.messages
    ]


def _content(content: Any, pictures: Iterator[Picture], dialect: ServerDialect) -> Any:
    if not isinstance(content, list):
        return content
    return [
        _part(next(pictures), dialect) if part.get("type") == "image" else part for part in content
    ]


def _part(picture: Picture, dialect: ServerDialect) -> dict[str, Any]:
    data = base64.b64encode(picture.file).decode("ascii")
    image: dict[str, Any] = {"url": f"data:{picture.media_type};base64,{data}"}
    if picture.max_pixels and dialect.max_pixels:
        image["max_pixels"] = picture.max_pixels
    elif 0 < picture.max_pixels <= _LOW_DETAIL:
        image["detail"] = "low"
    return {"type": "image_url", "image_url": image}


async def takes_pictures(connection: Connection, server: Server) -> bool:
    """Return True if a chat of one token with a picture is not refused."""
    content = [
        {"type": "image_url", "image_url": {"url": _GREY}},
        {"type": "text", "text": "Hello"},
    ]
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": content}],
        server.dialect.max_tokens: 1,
    }
    try:
        await connection.post("/chat/completions", body)
    except Overloaded:
        return True
    except MotetError as error:
        kind = "are refused" if isinstance(error, BadRequest) else "fail"
        log.warning("pictures %s: %s", kind, error.message)
        return False
    return True
