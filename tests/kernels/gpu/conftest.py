"""The Triton kernels: on a GPU where there is one, else in Triton's interpreter on tensors of the CPU."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch

from motet_kernels import gpu
from support.running.interpreted import SLOW

CUDA = torch.cuda.is_available()
if not CUDA:
    gpu.select("interpret")  # before anything imports Triton
    gpu.select("")


@pytest.hookimpl(tryfirst=True)  # before tiers are told apart
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests: with a GPU all need it; without one they are slow, in Triton's interpreter, but for compiling."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if CUDA:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.extended("gpu"))
        elif item.name in SLOW.get(item.path.name, ()):
            item.add_marker(pytest.mark.extended("families"))
        elif item.path.name != "test_gpu_compile.py":
            item.add_marker(pytest.mark.long)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file, with the reason, whose imports this Python lacks, if this project is not installed in it.

    `make gpu` runs so on a machine without a network: packages are absent, and an older transformers lacks classes.
    """
    report = yield
    text = str(report.longrepr)
    if report.failed and "ImportError while importing" in text and not is_installed():
        reason = text.strip().rpartition("\n")[2].removeprefix("E").strip()
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {collector.path.name}: {reason}")
    return report


def is_installed() -> bool:
    """Whether this project is installed, and with it all that its tests import."""
    try:
        distribution("motet")
    except PackageNotFoundError:
        return False
    return True


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    """Where tensors lie that the kernels take; sizes are to be small where that is the CPU."""
    gpu.select("on" if CUDA else "interpret")
    yield torch.device("cuda" if CUDA else "cpu")
    gpu.select("")
