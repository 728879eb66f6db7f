"""Read the text files of a request: base64 or data URLs, decoded as UTF-8."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re

from motet_shared.errors import BadRequest, UnsupportedParameter

from .items import InputFile

_DATA = re.compile(r"data:(?P<type>[^;,]*)(?:;[^;,]*)*;base64,", re.IGNORECASE)
LARGE = 256 << 10  # characters or bytes; longer files are decoded in a thread


async def file_text(file: InputFile, param: str) -> str:
    """Return a file as text for the model, headed by its name.

    Raises BadRequest for invalid base64, UnsupportedParameter for a file that is no text.
    """
    if file.file_data is None:
        message = f"`{param}` needs `file_data` or `file_id`"
        raise BadRequest(message, param=f"{param}.file_data")
    if len(file.file_data) > LARGE:
        return await asyncio.to_thread(_text, file.file_data, file.filename, param)
    return _text(file.file_data, file.filename, param)


def _text(data: str, name: str | None, param: str) -> str:
    where = f"{param}.file_data"
    head = _DATA.match(data)
    try:
        content = base64.b64decode(data[head.end() if head else 0 :].encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        message = f"`{where}`: invalid base64 ({error}); send data:text/plain;base64,…"
        raise BadRequest(message, param=where) from None
    kind = head["type"] if head and head["type"] else "this file"
    return headed(content, name, where, kind)


def headed(content: bytes, name: str | None, where: str, kind: str = "this file") -> str:
    """Return the text of a file, headed by its name; `where` and `kind` name it in errors.

    Raises UnsupportedParameter if it is no text.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        message = f"`{where}`: {kind[:60]} is no text in UTF-8; extract its text first"
        raise UnsupportedParameter(message, param=where)
    return f"File {name or 'without a name'}:\n\n{text}"
