"""Lines of a batch's file: however it is cut into parts, and whatever is in it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_gateway.batches import lines as module
from motet_gateway.batches.lines import Line, check_file, lines_of

URL = "/v1/embeddings"


async def parts_of(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def read(parts: list[bytes], most: int = 1000) -> list[Line]:
    return [line async for line in lines_of(parts_of(parts), most)]


@given(st.lists(st.sampled_from([b"a", b"bcd", b"\n", b"\n\n", b" ", b"e\nf", b""]), max_size=20))
async def test_parts_may_end_anywhere(parts: list[bytes]) -> None:
    whole = b"".join(parts).split(b"\n")
    wanted = [Line(n, line) for n, line in enumerate(whole, 1) if line.strip(b" ")]
    assert await read(parts) == wanted


@given(st.integers(1, 12))
async def test_a_line_that_is_too_long_is_not_kept(size: int) -> None:
    data = b"12345\n1234567890\n123\n" + b"x" * 9
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    found = await read(parts, most=5)
    assert found == [Line(1, b"12345"), Line(2, None), Line(3, b"123"), Line(4, None)]


def line(custom_id: Any = "a", **fields: Any) -> bytes:
    given = {"custom_id": custom_id, "method": "POST", "url": URL, "body": {}}
    return json.dumps(given | fields).encode()


@pytest.mark.parametrize(
    ("data", "code", "param"),
    [
        (b"[" * 5000, "invalid_request", None),
        (line(body="?").replace(b'"?"', b"[" * 5000), "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b"[]", "invalid_request", None),
        (line(5), "invalid_request", "custom_id"),
        (line(""), "invalid_request", "custom_id"),
        (line("x" * 513), "invalid_request", "custom_id"),
        (line(colour="red"), "unsupported_parameter", "colour"),
        (line(body="x"), "invalid_request", "body"),
        (line(url="/v1/chat"), "invalid_url", "url"),
        (line(body={"x": "y" * 9000}), "line_too_long", None),
    ],
)
async def test_wrong_lines_are_named(data: bytes, code: str, param: str | None) -> None:
    checked = await check_file(parts_of([line(), b"\n", data]), URL, 8000, 10)
    (error,) = checked.errors
    assert (error.line, error.code, error.param) == (2, code, param)


async def test_the_check_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LINES", 20)
    many = [line(f"{n}") + b"\n" for n in range(21)]
    checked = await check_file(parts_of(many), URL, 1000, 10)
    assert [(error.code, error.line) for error in checked.errors] == [("too_many_lines", 21)]
    assert not (await check_file(parts_of(many[:20]), URL, 1000, 10)).errors
    checked = await check_file(parts_of([b"x\n"] * 20), URL, 1000, 10)
    assert len(checked.errors) == checked.total == 10
