"""Gates on every instruction set of this CPU and in torch, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels import gates
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

ORACLES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
}
VALUES = torch.cat(
    (torch.linspace(-100, 100, 4001), torch.logspace(-30, 1, 500), -torch.logspace(-30, 1, 500))
)


@pytest.mark.parametrize("name", ORACLES)
def test_equals_float64(backend: str, name: str) -> None:
    x_MC = VALUES.repeat(2).view(2, -1)[:, 1:]
    out = getattr(gates, name)(x_MC)
    # Below e^-87 results are too small for normal numbers of float32.
    torch.testing.assert_close(out.double(), ORACLES[name](x_MC.double()), rtol=2e-6, atol=1e-36)


def test_gelu_equals_float64(backend: str) -> None:
    """Its error is that of the polynomial, which grows with the value."""
    out = gates.gelu(VALUES[None]).double()
    assert bool(((out - F.gelu(VALUES[None].double())).abs() <= 3e-7 * VALUES.abs() + 1e-36).all())


def test_gelu_by_tanh_equals_float64(backend: str) -> None:
    out = gates.gelu_tanh(VALUES[None]).double()
    oracle = F.gelu(VALUES[None].double(), approximate="tanh")
    assert bool(((out - oracle).abs() <= 1e-6 * VALUES.abs() + 1e-36).all())


@pytest.mark.parametrize("name", [*ORACLES, "gelu", "gelu_tanh"])
@pytest.mark.parametrize("width", [1, 24, 1000])
def test_bfloat16_is_computed_in_float32_and_rounded_once(isa: str, name: str, width: int) -> None:
    x_MC = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    gate = getattr(gates, name)
    assert torch.equal(gate(x_MC), gate(x_MC.float()).bfloat16())
    if name in ("silu", "gelu_tanh"):
        both_MC = torch.cat((x_MC, x_MC.flip(0)), dim=1)
        right = gates.gated(both_MC.float(), name).bfloat16()
        assert torch.equal(gates.gated(both_MC, name), right)


@pytest.mark.parametrize("name", ORACLES)
def test_special_values(backend: str, name: str) -> None:
    x_MC = torch.tensor([[torch.inf, torch.nan, 0.0, 1e30, -1e30]])
    torch.testing.assert_close(getattr(gates, name)(x_MC), ORACLES[name](x_MC), equal_nan=True)


@pytest.mark.parametrize("name", [*ORACLES, "gelu", "gelu_tanh"])
@pytest.mark.parametrize("width", [1, 24, 1000])
def test_native_bits_do_not_depend_on_the_place(isa: str, name: str, width: int) -> None:
    gate = getattr(gates, name)
    x_MC = torch.randn(200, width, generator=torch.Generator().manual_seed(0))
    torch.set_num_threads(2)
    whole = gate(x_MC)
    torch.set_num_threads(1)
    for start, stop in ((0, 1), (1, 3), (3, 200)):
        assert torch.equal(gate(x_MC[start:stop]), whole[start:stop])
    assert torch.equal(gate(x_MC.flatten()[3:7][None]), whole.flatten()[3:7][None])


def test_empty_and_wrong_inputs() -> None:
    assert gates.silu(torch.zeros(0, 8)).shape == (0, 8)
    with refuses(KernelError, "x_MC"):
        gates.silu(torch.zeros(1, 2, dtype=torch.float64))
    with refuses(KernelError, "x_MC"):
        gates.softplus(torch.zeros(3, 2).T)
