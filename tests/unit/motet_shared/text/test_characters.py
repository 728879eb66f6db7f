"""Test the bounds of JSON values: how many characters they have, and how deep they are."""

from __future__ import annotations

from typing import Any

import pytest

from motet_shared.text.characters import is_deeper


def nested(depth: int) -> Any:
    value: Any = 0
    for number in range(depth):
        value = [value] if number % 2 else {"a": 1, "b": value}
    return value


@pytest.mark.parametrize("depth", [0, 1, 2, 7, 5000])
def test_what_is_deeper_is_known_without_recursion(depth: int) -> None:
    assert not is_deeper(nested(depth), depth)
    assert not is_deeper([nested(depth)], depth + 1)
    assert is_deeper(nested(depth + 1), depth)
