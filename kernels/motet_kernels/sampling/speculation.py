"""Verify drafts: count how many draft tokens agree with the tokens that the model drew.

A draft of k tokens has k + 1 rows: one before each of its tokens, and one after the last. A draft
token is right if the token drawn in the row before it is the same; what is drawn after a wrong one
is meaningless.

Shapes: R rows, B drafts (which may be empty), K tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.runtime.errors import KernelError
from motet_kernels.spans import upload

NONE = -2  # neither a token id nor -1, which `draw` returns for rows it cannot draw from


def agreement(ids_R: Tensor, drafts: Sequence[Sequence[int]]) -> Tensor:
    """Return how many leading tokens of each draft are right, int32 `[B]` on `ids_R`'s device.

    ids_R: int64, the drawn tokens, rows of consecutive drafts one after the other. Raises
    `KernelError` on ids of another type, or of another number of rows than the drafts have.
    """
    rows = sum(1 + len(draft) for draft in drafts)
    if ids_R.dtype != torch.int64 or ids_R.shape != (rows,):
        found = f"{ids_R.dtype} {list(ids_R.shape)}"
        raise KernelError(
            f"ids_R: {found} must be int64 [{rows}], of each draft a row more than it has tokens"
        )
    drafts_BK = np.full((len(drafts), max(map(len, drafts), default=0)), NONE, np.int64)
    for row, draft in zip(drafts_BK, drafts, strict=True):
        row[: len(draft)] = draft
    starts_B = np.cumsum([0, *(1 + len(draft) for draft in drafts[:-1])], dtype=np.int64)[
        : len(drafts)
    ]
    packed = upload(torch.from_numpy(np.concatenate([starts_B, drafts_BK.ravel()])), ids_R.device)
    starts, guesses = packed[: len(drafts)], packed[len(drafts) :].view(drafts_BK.shape)
    if gpu.takes(ids_R):
        from motet_kernels.gpu.sampling import speculation as kernels

        return kernels.agreement(ids_R, guesses, starts)
    return agreement_torch(ids_R, guesses, starts)


def agreement_torch(ids_R: Tensor, drafts_BK: Tensor, starts_B: Tensor) -> Tensor:
    """Compute `agreement` in torch: its twin.

    `drafts_BK`, int64, are padded with `NONE`; `starts_B`, int64, are the drafts' first rows.
    """
    steps_K = torch.arange(drafts_BK.shape[1], device=ids_R.device)
    rows_BK = (starts_B.unsqueeze(1) + steps_K).clamp_(max=max(len(ids_R) - 1, 0))
    return (ids_R[rows_BK] == drafts_BK).int().cumprod(1).sum(1, dtype=torch.int32)
