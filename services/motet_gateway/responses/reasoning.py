"""Write reasoning items, and read them again from a client that sends them back.

`encrypted_content` is for clients that keep conversations themselves. It holds the text that the
item shows as well, so it is encoded, not secret.
"""

from __future__ import annotations

import base64
import binascii
import zlib

from motet_shared.errors import BadRequest

from .items import ReasoningItem

_MARK = "motet1."  # of the encoding
_MOST = 4 << 20  # bytes of the reasoning of one item


def encoded(text: str) -> str:
    """Return `encrypted_content` for a reasoning text."""
    return _MARK + base64.b64encode(zlib.compress(text.encode())).decode()


def reasoning_of(item: ReasoningItem, param: str) -> str:
    """Return the text of a reasoning item: its content, or else what `encrypted_content` holds.

    Raises BadRequest for encrypted content of another server.
    """
    if item.content is not None:
        return "".join(part.text for part in item.content)
    if item.encrypted_content is None:
        return "\n".join(part.text for part in item.summary)
    where = f"{param}.encrypted_content"
    try:
        if not item.encrypted_content.startswith(_MARK):
            raise ValueError
        data = base64.b64decode(item.encrypted_content.removeprefix(_MARK), validate=True)
        unpacked = zlib.decompressobj()
        text = unpacked.decompress(data, _MOST).decode()
        if unpacked.unconsumed_tail:
            raise ValueError
    except (ValueError, binascii.Error, zlib.error):
        message = f"`{where}` is not of this server; send `content`, or leave the item out"
        raise BadRequest(message, param=where) from None
    return text
