"""Read the recordings of a chat from its `input_audio` parts, for the service that encodes them.

Only base64 and size are checked here; the service decodes and checks the file.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from dataclasses import dataclass

from motet_gateway.config import GatewayConfig
from motet_shared.errors import BadRequest, PayloadTooLarge

from .schema import InputAudio

_INLINE = 256 << 10  # characters; longer data is decoded in a thread


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording as the client sent it; `param` is its path in the request."""

    param: str
    audio: InputAudio


async def read_recording(source: Recording, config: GatewayConfig) -> bytes:
    """Return the file of a recording.

    Raises BadRequest for data that is empty or no base64, PayloadTooLarge for a large file.
    """
    if len(source.audio.data) <= _INLINE:
        return _decoded(source, config.max_upload)
    return await asyncio.to_thread(_decoded, source, config.max_upload)


def _decoded(source: Recording, most: int) -> bytes:
    text, param = source.audio.data, f"{source.param}.data"
    if len(text) * 3 // 4 > most + 2:
        raise PayloadTooLarge(
            f"`{param}`: the file has more than {most} bytes (--max-upload)", param=param
        )
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise BadRequest(
            f"`{param}`: invalid base64 ({error}); encode the file again", param=param
        ) from None
    if not data:
        raise BadRequest(f"`{param}`: the file is empty; send a {source.audio.format}", param=param)
    return data
