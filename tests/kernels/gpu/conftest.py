"""The Triton kernels: on a GPU where there is one, else in Triton's interpreter on tensors of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from motet_kernels import gpu

CUDA = torch.cuda.is_available()

if not CUDA:
    gpu.select("interpret")  # before anything imports Triton
    gpu.select("")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a GPU, all of these tests need it."""
    for item in items:
        if CUDA and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    """Where tensors lie that the kernels take; sizes are to be small where that is the CPU."""
    gpu.select("on" if CUDA else "interpret")
    yield torch.device("cuda" if CUDA else "cpu")
    gpu.select("")
