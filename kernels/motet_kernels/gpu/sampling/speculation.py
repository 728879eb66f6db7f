"""Count how many tokens of drafts are right: a program per draft, which is shorter than a warp.

Shapes: R rows, B drafts, K tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.gpu.launch import Config, GpuKernel, LaunchSample


@triton.jit
def _agreement(ids_ptr, drafts_ptr, starts_ptr, out_ptr, K, R, BLOCK: tl.constexpr):
    draft = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    start = tl.load(starts_ptr + draft)
    drawn = tl.load(ids_ptr + start + at, mask=(at < K) & (start + at < R), other=-1)
    guess = tl.load(drafts_ptr + draft.to(tl.int64) * K + at, mask=at < K, other=-2)
    wrong = tl.where(drawn == guess, BLOCK, at)  # nothing is equal after the last draft token
    tl.store(out_ptr + draft, tl.minimum(tl.min(wrong, 0), K))


_AGREEMENT = GpuKernel(_agreement, Config(warps=1))


def agreement(ids_R: Tensor, drafts_BK: Tensor, starts_B: Tensor) -> Tensor:
    """Compute `motet_kernels.sampling.speculation.agreement_torch` with Triton."""
    count, longest = drafts_BK.shape
    out_B = torch.empty(count, dtype=torch.int32, device=ids_R.device)
    block = triton.next_power_of_2(max(longest, 1))
    _AGREEMENT((count,), ids_R, drafts_BK, starts_B, out_B, longest, len(ids_R), BLOCK=block)
    return out_B


def samples() -> Iterator[LaunchSample]:
    """Yield drafts of 32 requests, of the usual length and of the longest."""
    for longest in (5, 32):
        ids_R = torch.zeros(32 * (1 + longest), dtype=torch.int64)
        drafts_BK, starts_B = (
            torch.zeros(32, longest, dtype=torch.int64),
            torch.zeros(32, dtype=torch.int64),
        )
        yield LaunchSample(f"32 × {longest}", partial(agreement, ids_R, drafts_BK, starts_B))
