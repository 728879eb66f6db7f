"""Compare a GPU, or Triton's interpreter, with the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from motet_kernels import gpu


@contextmanager
def without_triton() -> Iterator[None]:
    """Make the block compute as on a machine without GPU."""
    mode = gpu.mode()
    gpu.select("off")
    try:
        yield
    finally:
        gpu.select(mode)


def calls_of(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[None]:
    """Return a list that grows with each call of a module's function."""
    calls: list[None] = []
    function = getattr(module, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, called)
    return calls
