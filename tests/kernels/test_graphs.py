"""Steps of which a graph would repeat a choice that depended on data are refused before they are captured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.graphs import RefusingData, graphs_on
from support.engine.recorded_graphs import RecordedGraphs

X = torch.tensor([3, 0, 1, 2])


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum().item(),
        lambda x: torch.where(x > 1),
        lambda x: x + 1 if x.max() > 2 else x,
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.masked_select(x > 1),
        lambda x: x.repeat_interleave(x),
        lambda x: torch.equal(x, x),
        lambda x: x + torch.tensor([1, 2, 3, 4]),
    ],
)
def test_what_depends_on_data_is_refused(step: Callable[[Tensor], object]) -> None:
    with torch.inference_mode(), RefusingData(), pytest.raises(KernelError):
        step(X)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x[x],
        lambda x: x.clone().index_put_((x,), x),
        lambda x: torch.where(x > 1, x, 0) + torch.arange(4),
        lambda x: x.float() * torch.tensor(0.5),
        lambda x: x.view(2, 2).T.contiguous(),
    ],
)
def test_what_reads_tensors_on_the_device_is_not(step: Callable[[Tensor], object]) -> None:
    with torch.inference_mode(), RefusingData():
        step(X)


def test_only_a_gpu_captures() -> None:
    with pytest.raises(KernelError, match=r"^device='cpu'"):
        graphs_on(torch.device("cpu"))


def test_a_recorded_step_computes_what_its_inputs_hold_now() -> None:
    """The stand-in for CUDA graphs runs no Python of the step, and writes where the step wrote."""
    x, out = torch.zeros(4), torch.zeros(2, 2)
    calls: list[None] = []

    def step() -> None:
        calls.append(None)
        doubled = (x * 2).view(2, 2)
        doubled[0] += 1
        out.copy_(doubled.T.contiguous())

    graph = RecordedGraphs().capture(step)
    before = len(calls)
    for start in (1.0, 5.0):
        x.copy_(torch.arange(start, start + 4))
        graph.replay()
        assert out.tolist() == [[2 * start + 1, 2 * start + 4], [2 * start + 3, 2 * start + 6]]
    assert len(calls) == before


def test_a_step_that_reads_numbers_on_the_host_is_refused() -> None:
    def step() -> None:
        X[: X.tolist()[0]].sum()

    with torch.inference_mode(), pytest.raises(KernelError):
        RecordedGraphs().capture(step)
