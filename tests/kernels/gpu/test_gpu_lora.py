"""Mixed adapters in Triton against float64."""

from __future__ import annotations

import pytest
import torch

from motet_kernels import gpu
from motet_kernels.linear.lora import LoraFactors
from motet_kernels.linear.segments import FREE, Segments
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SLOTS = 4


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def made(
    inputs: int, outputs: int, rank: int, dtype: torch.dtype, device: torch.device
) -> LoraFactors:
    factors = LoraFactors(SLOTS, rank, inputs, outputs, dtype, device)
    for slot in range(SLOTS - 1):
        own = max(1, rank - 3 * slot)
        down, up = randn(own, inputs) * inputs**-0.5, randn(outputs, own) * own**-0.5
        factors.put(slot, down.to(device), up.to(device), 0.5 + slot)
    return factors


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(("inputs", "outputs", "rank"), [(40, 70, 5), (130, 33, 16), (64, 150, 33)])
def test_equals_float64(
    device: torch.device, inputs: int, outputs: int, rank: int, dtype: torch.dtype
) -> None:
    factors = made(inputs, outputs, rank, dtype, device)
    slots = [2, FREE, 0, 0, 1, FREE, 3, *[2] * 18]
    x = randn(len(slots), inputs + 2).to(device, dtype)[:, 1 : inputs + 1]
    held = randn(len(slots), outputs + 5).to(device, dtype)
    before, out = held.clone(), held[:, 2 : outputs + 2]
    due = out.double()
    for row, slot in enumerate(slots):
        if slot != FREE:
            down, up = (part.double() for part in factors.factors(slot))
            due[row] += float(factors.scales_S[slot]) * (up @ (down @ x[row].double()))
    factors.add(x, out, Segments.of(slots, device))
    torch.testing.assert_close(
        out.double(), due, rtol=TOLERANCES[dtype], atol=4 * TOLERANCES[dtype]
    )
    assert torch.equal(held[:, :2], before[:, :2])
    assert torch.equal(held[:, outputs + 2 :], before[:, outputs + 2 :])
    assert torch.equal(held[[1, 5, 6]], before[[1, 5, 6]])


def test_a_row_has_the_same_bits_in_any_company(device: torch.device) -> None:
    factors = made(96, 80, 8, torch.bfloat16, device)
    slots = [0, 1, 0, FREE, *[0] * 17]
    x, base = (randn(len(slots), width).to(device, torch.bfloat16) for width in (96, 80))
    whole = base.clone()
    factors.add(x, whole, Segments.of(slots, device))
    for row in (0, 1, 20):
        alone = base[row : row + 1].clone()
        factors.add(x[row : row + 1], alone, Segments.of([slots[row]], device))
        assert torch.equal(alone[0], whole[row])


def test_a_batch_without_adapters_and_the_twin(device: torch.device) -> None:
    factors = made(32, 48, 8, torch.float32, device)
    x, out = randn(5, 32).to(device), randn(5, 48).to(device)
    free = out.clone()
    factors.add(x, free, Segments.of([FREE] * 5, device))
    assert torch.equal(free, out)
    ours, twin = out.clone(), out.clone()
    segments = Segments.of([1, 0, 1, FREE, 2], device)
    factors.add(x, ours, segments)
    factors.add_torch(x, twin, segments)
    torch.testing.assert_close(ours, twin)


def test_wrong_arguments_are_named(device: torch.device) -> None:
    factors = made(32, 48, 8, torch.float32, device)
    assert gpu.is_gpu(device)
    with refuses(KernelError, "x"):
        factors.add(
            torch.zeros(5, 30, device=device),
            torch.zeros(5, 48, device=device),
            Segments.of([0] * 5, device),
        )
    with refuses(KernelError, "out"):
        factors.add(
            torch.zeros(5, 32, device=device),
            torch.zeros(5, 48, device="meta"),
            Segments.of([0] * 5, device),
        )
