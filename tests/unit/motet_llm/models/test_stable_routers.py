"""Rows of routers and sigmoids do not depend on the rows beside them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet_llm.models import stable_routers

EXPERTS, HIDDEN = 7, 64


class TopRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = TopRouter()

    def forward(self, x: Tensor) -> Tensor:
        return self.router(x).sigmoid()


@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    torch.manual_seed(0)
    block = Block()
    rows = torch.randn(133, HIDDEN)
    expected = block(rows)
    assert stable_routers.install(block) == 1
    whole = block(rows)
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
    for count in (1, 2, 5, 33):
        parts = torch.cat([block(part) for part in rows.split(count)])
        assert torch.equal(parts, whole)


def test_a_model_without_routers_is_left_alone() -> None:
    assert stable_routers.install(nn.Sequential(nn.Linear(4, 4))) == 0
