"""Products by head as a GPU computes them: all heads at once, by torch."""

from __future__ import annotations

import pytest
import torch

from motet_kernels.linear.head_linear import GPU_FORMATS, HeadLinear
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("form", GPU_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_products_of_strided_heads(
    device: torch.device, rows: int, dtype: torch.dtype, form: str
) -> None:
    weight = randn(3, 7, 10)
    linear = HeadLinear.pack(weight, form, device)
    x = randn(rows, 3, 14).to(device, dtype)[..., :10]
    held = torch.full((rows, 3, 9), torch.nan, dtype=dtype, device=device)
    out = linear(x, held[..., :7])
    assert held[..., 7:].isnan().all()
    due = torch.einsum(
        "mhk,hnk->mhn", x.to(getattr(torch, form)).double(), linear.weight().double()
    )
    tolerance = max(TOLERANCES[form], TOLERANCES[str(dtype)[6:]])
    torch.testing.assert_close(out.double(), due, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(linear(x), out)


def test_wrong_arguments_are_named(device: torch.device) -> None:
    with refuses(KernelError, "form"):
        HeadLinear.pack(randn(2, 3, 4), "int8", device)
    with refuses(KernelError, "weight_HNK"):
        HeadLinear.pack(randn(2, 3, 4).double(), "float32", device)
    with refuses(KernelError, "x_MHK"):
        HeadLinear.pack(randn(2, 3, 4), "float32", device)(torch.zeros(1, 2, 4, device="meta"))
