"""Read the lines of a stored file one after another, and check each as a request of a batch."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from motet_gateway.http.decoding import explain
from motet_shared.errors import BadRequest

from .schema import BatchLine
from .store import LineError

MOST_LINES = 50_000
_BLANK = b" \t\r"
_MOST_SHOWN = 64 << 10  # bytes of a line whose value is shown in an error
_MOST_COMPARED = 16  # bytes of a custom_id's digest


class Line(NamedTuple):
    """A line that is not blank. `data` is None if it has more bytes than are accepted."""

    number: int  # from 1
    data: bytes | None


_decode = msgspec.json.Decoder(BatchLine).decode


async def lines_of(parts: AsyncIterable[bytes], most: int) -> AsyncGenerator[Line, None]:
    """Yield the lines of a file that comes in parts; at most `most` bytes of a line are kept."""
    number, held, is_long = 1, bytearray(), False
    async for part in parts:
        start = 0
        while (end := part.find(b"\n", start)) >= 0:
            is_long = is_long or len(held) + end - start > most
            held += b"" if is_long else part[start:end]
            if is_long or held.strip(_BLANK):
                yield Line(number, None if is_long else bytes(held))
            held.clear()
            number, start, is_long = number + 1, end + 1, False
        is_long = is_long or len(held) + len(part) - start > most
        if is_long:
            held.clear()
        else:
            held += part[start:]
    if is_long or held.strip(_BLANK):
        yield Line(number, None if is_long else bytes(held))


def digest(custom_id: str) -> bytes:
    """Return what is compared instead of a custom_id, which takes more memory."""
    return hashlib.blake2b(custom_id.encode(), digest_size=_MOST_COMPARED).digest()


def request_of(line: bytes) -> BatchLine:
    """Return a line that was checked before."""
    return _decode(line)


class Checked(NamedTuple):
    """What the check of an input file found: its requests, or the errors of its lines."""

    total: int
    errors: list[LineError]


async def check_file(
    parts: AsyncIterable[bytes], endpoint: str, most: int, most_errors: int
) -> Checked:
    """Check all lines of an input file; stop at `most_errors` errors, or at too many lines."""
    known: set[bytes] = set()
    errors: list[LineError] = []
    total = 0
    async with aclosing(lines_of(parts, most)) as lines:
        async for line in lines:
            total += 1
            if total > MOST_LINES:
                message = f"the file has more than {MOST_LINES} requests; split it"
                return Checked(total, [LineError("too_many_lines", message, line.number)])
            if (error := _error_of(line, endpoint, most, known)) is not None:
                errors.append(error)
            if len(errors) >= most_errors:
                break
    if not total:
        errors.append(LineError("empty_file", "the file has no requests; give one per line"))
    return Checked(total, errors)


def _error_of(line: Line, endpoint: str, most: int, known: set[bytes]) -> LineError | None:
    """Return what is wrong with a line, None if nothing is; its custom_id is added to `known`."""
    if line.data is None:
        message = f"the line has more than {most} bytes (--max-body); shorten it"
        return LineError("line_too_long", message, line.number)
    try:
        request = _decode(line.data)
        is_object = bytes(request.body).lstrip()[:1] == b"{"
    except msgspec.ValidationError as error:
        shown = line.data if len(line.data) <= _MOST_SHOWN else b""
        known_error: BadRequest = explain(str(error), shown)
        return LineError(known_error.code, known_error.message, line.number, known_error.param)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        message = f"the line is not valid JSON: {error}"
        return LineError("invalid_json_line", message, line.number)
    if request.url != endpoint:
        message = f"`url` is {request.url[:80]!r}, the batch's endpoint is {endpoint!r}"
        return LineError("invalid_url", message, line.number, "url")
    if not is_object:
        return LineError("invalid_request", "`body` is no object", line.number, "body")
    if (found := digest(request.custom_id)) in known:
        message = f"`custom_id` {request.custom_id[:80]!r} is that of an earlier line"
        return LineError("duplicate_custom_id", message, line.number, "custom_id")
    known.add(found)
    return None
