"""Running a test on each instruction set of this CPU, and on torch."""

from collections.abc import Iterator

import pytest
import torch

from motet_kernels.runtime import native
from motet_kernels.runtime.build import supported

ISAS = [isa.name for isa in supported()]


@pytest.fixture(params=ISAS, scope="module")
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this CPU has; one thread, because others may want the rest."""
    yield from _use(request.param)


@pytest.fixture(params=[*ISAS, "off"], scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same, and the torch twins."""
    yield from _use(request.param)


def _use(name: str) -> Iterator[str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    status = native.select(name)
    assert status["isa"] == ("torch" if name == "off" else name), status["reason"]
    yield name
    native.select("")
    torch.set_num_threads(threads)
