"""Experts in codes as GPUs multiply them, in Triton, against the weights that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from motet_kernels.linear.expert_linear import ExpertLinear, ExpertRows
from motet_kernels.linear.group_weights import GroupWeights
from motet_kernels.linear.pack import pack_linear
from motet_kernels.runtime.errors import KernelError

EXPERTS, FEATURES, INPUTS = 4, 37, 96
# None for expert 1; an index that is no expert's; several tiles for expert 2.
INDEX = torch.tensor([[0, 2]] * 3 + [[2, EXPERTS]] * 30 + [[3, 2]])


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _due(x_RK: Tensor, rows: ExpertRows, dense_ENK: Tensor, bias_EN: Tensor | None) -> Tensor:
    """Return the products of rows with their expert's dense matrix, zero for rows of none."""
    out_RN = torch.zeros(len(x_RK), dense_ENK.shape[1])
    for row, expert in enumerate(rows.expert_R.tolist()):
        if expert < EXPERTS:
            out_RN[row] = dense_ENK[expert] @ x_RK[row].float()
            out_RN[row] += 0 if bias_EN is None else bias_EN[expert]
    return out_RN


def _check(linear: ExpertLinear, dense_ENK: Tensor, bias_EN: Tensor | None, x: Tensor) -> None:
    rows = ExpertRows.of(INDEX.to(x.device), EXPERTS)
    assert rows.tiles_X3[:, 2].sum() == (INDEX < EXPERTS).sum()
    x_RK = x[rows.order_R // INDEX.shape[1]]
    due = _due(x_RK.cpu(), rows, dense_ENK.cpu(), bias_EN)
    tolerance = 1e-4 if x.dtype == torch.float32 else 3e-2
    size = float(due.abs().max())
    for out in (linear(x_RK, rows), linear.forward_torch(x_RK, rows)):
        assert out.dtype == x.dtype
        torch.testing.assert_close(out.float().cpu(), due, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["int4", "int8", "float8"])
def test_experts_of_floats_are_rounded_as_matrices_are(
    form: str, dtype: torch.dtype, device: torch.device
) -> None:
    weight_ENK, bias_EN = _randn(EXPERTS, FEATURES, INPUTS), _randn(EXPERTS, FEATURES, seed=1)
    linear = ExpertLinear.quantized(weight_ENK, bias_EN, form, device)
    dense_ENK = torch.stack([pack_linear(w, None, form, device).weight() for w in weight_ENK])
    _check(linear, dense_ENK, bias_EN, _randn(len(INDEX), INPUTS, seed=2).to(device, dtype))


@pytest.mark.parametrize("levels", [None, "fp4"])
def test_codes_of_checkpoints(levels: str | None, device: torch.device) -> None:
    """Shifts and an order of inputs by expert, or a table of levels."""
    given = torch.Generator().manual_seed(0)
    weights = [
        GroupWeights(
            torch.randint(16, (FEATURES, INPUTS), generator=given, dtype=torch.uint8),
            torch.rand(FEATURES, 3, generator=given) + 0.1,
            None if levels else torch.rand(FEATURES, 3, generator=given),
            32,
            None if levels else torch.randperm(INPUTS, generator=given),
            levels,
        )
        for _ in range(EXPERTS)
    ]
    dense_ENK = torch.stack([one.dense() for one in weights])
    linear = ExpertLinear(weights, None, device)
    _check(linear, dense_ENK, None, _randn(len(INDEX), INPUTS).to(device))


def test_rows_of_few_tokens_and_of_many_have_tiles_of_their_own() -> None:
    few, many = ExpertRows.of(INDEX, EXPERTS), ExpertRows.of(INDEX.repeat(20, 1), EXPERTS)
    assert (few.tile, many.tile) == (64, 64) or few.tile < many.tile
    for rows in (few, many):
        covered = [
            (expert, row)
            for expert, first, count in rows.tiles_X3.tolist()
            for row in range(first, first + count)
        ]
        due = [(e, row) for row, e in enumerate(rows.expert_R.tolist()) if e < EXPERTS]
        assert sorted(covered) == sorted(due)


def test_experts_that_differ_are_refused(device: torch.device) -> None:
    four = ExpertLinear.quantized(_randn(2, 8, 32), None, "int4", device)
    assert four.nbytes < 2 * 8 * 32 * 4
    small, large = (
        GroupWeights(torch.zeros(n, 32, dtype=torch.uint8), torch.ones(n, 1), None, 32)
        for n in (8, 9)
    )
    with pytest.raises(KernelError):
        ExpertLinear([small, large], None, device)
    with pytest.raises(KernelError):
        ExpertLinear.quantized(_randn(2, 8, 32), None, "bfloat16", device)
