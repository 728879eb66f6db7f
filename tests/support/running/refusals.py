"""Expect a refusal by its class and by the field that it names, whatever its words are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from motet_kernels.runtime.errors import KernelError
from motet_shared.errors import MotetError


@contextmanager
def refuses(
    kind: type[MotetError] | type[KernelError], param: str | None
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Require that the block raises exactly `kind`, about the field `param`."""
    with pytest.raises(kind) as caught:
        yield caught
    assert type(caught.value) is kind, caught.value
    assert caught.value.param == param, caught.value
