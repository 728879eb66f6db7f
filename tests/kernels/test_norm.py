"""Norm, rotary embedding and gated products on every instruction set and in torch, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from motet_kernels.attention.head_norm import HeadNorm
from motet_kernels.attention.rotary import rotate_heads, rotate_heads_torch
from motet_kernels.gates import gated
from motet_kernels.norm import layer_norm, layer_norm_torch, rms_norm, rms_norm_torch
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("width", [1, 5, 16, 64, 100, 1024])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(backend: str, width: int, offset: float) -> None:
    x, weight = randn(2, 3, width * 2)[..., ::2] * 3, randn(width)
    expected = rms_norm_torch(x.double(), weight.double(), 1e-6, offset)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-6, offset).double(), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("width", [1, 5, 16, 100, 1024])
def test_layer_norm(backend: str, width: int) -> None:
    x, weight, bias = randn(2, 3, width * 2)[..., ::2] * 3 + 5, randn(width), randn(width + 1)[1:]
    expected = layer_norm_torch(x.double(), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(
        layer_norm(x, weight, bias, 1e-5).double(), expected, rtol=1e-5, atol=2e-6
    )


@pytest.mark.parametrize("width", [5, 16, 100, 1024])
def test_bfloat16_is_computed_in_float32_and_rounded_once(isa: str, width: int) -> None:
    x, weight = randn(6, width).bfloat16(), randn(width)
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.float(), weight, 1e-6).bfloat16())
    assert torch.equal(
        layer_norm(x, weight, weight, 1e-5), layer_norm(x.float(), weight, weight, 1e-5).bfloat16()
    )


@pytest.mark.parametrize("width", [3, 48, 130])
def test_a_row_s_bits_do_not_depend_on_its_company(isa: str, width: int) -> None:
    x, weight = randn(40, width), randn(width)
    whole = (
        rms_norm(x, weight, 1e-6),
        layer_norm(x, weight, weight, 1e-5),
        gated(torch.cat((x, x), dim=1), "silu"),
        gated(torch.cat((x, x), dim=1), "gelu_tanh"),
    )
    for start, stop in ((0, 1), (1, 4), (17, 40)):
        part = x[start:stop]
        twice = torch.cat((part, part), dim=1)
        parts = (
            rms_norm(part, weight, 1e-6),
            layer_norm(part, weight, weight, 1e-5),
            gated(twice, "silu"),
            gated(twice, "gelu_tanh"),
        )
        for one, all_rows in zip(parts, whole, strict=True):
            assert torch.equal(one, all_rows[start:stop])


@pytest.mark.parametrize(
    ("heads", "queries", "dim", "rotary"),
    [(3, 2, 16, 16), (6, 4, 20, 8), (2, 1, 128, 64), (1, 1, 2, 2)],
)
@pytest.mark.parametrize("normed", [False, True])
def test_rotate_heads(
    backend: str, heads: int, queries: int, dim: int, rotary: int, normed: bool
) -> None:
    x_NC = randn(5, heads * dim + 7)[:, : heads * dim]
    cos, sin = randn(5, rotary), randn(5, rotary + 0).roll(1, 0).contiguous()
    norm = HeadNorm(randn(dim), randn(dim) + 1, 1e-6, 0.5) if normed else None
    out = rotate_heads(x_NC, queries, dim, cos, sin, norm)
    wide = norm and norm._replace(
        q_weight_D=norm.q_weight_D.double(), k_weight_D=norm.k_weight_D.double()
    )
    expected = rotate_heads_torch(x_NC.double(), queries, dim, cos.double(), sin.double(), wide)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [1, 24, 97])
def test_gated(backend: str, width: int) -> None:
    x = randn(3, 4, 2 * width) * 4
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(gated(x, "silu").double(), F.silu(gate) * up, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        gated(x, "gelu_tanh").double(), F.gelu(gate, approximate="tanh") * up, rtol=1e-4, atol=1e-5
    )


def test_bfloat16_goes_through_torch() -> None:
    x = randn(2, 8).bfloat16()
    assert rms_norm(x, torch.ones(8), 1e-6).dtype == torch.bfloat16
    assert gated(x, "silu").dtype == torch.bfloat16


def test_wrong_arguments_are_named() -> None:
    with refuses(KernelError, "weight_C"):
        rms_norm(torch.zeros(2, 4), torch.zeros(3), 1e-6)
    with refuses(KernelError, "activation"):
        gated(torch.zeros(2, 4), "relu")
    table = torch.zeros(2, 4)
    with refuses(KernelError, "cos_NR"):
        rotate_heads(torch.zeros(3, 8), 1, 4, table, table)
    with refuses(KernelError, "x_NC"):
        rotate_heads(torch.zeros(2, 8), 1, 3, table, table)
    with refuses(KernelError, "cos_NR"):
        rotate_heads(torch.zeros(2, 8), 1, 2, table, table)
    with refuses(KernelError, "k_weight_D"):
        rotate_heads(
            torch.zeros(2, 8), 1, 4, table, table, HeadNorm(torch.zeros(4), torch.zeros(2), 0.0)
        )
