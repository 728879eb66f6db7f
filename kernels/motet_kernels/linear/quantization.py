"""Quantize weights and activations: round to nearest, symmetric.

Shapes: N output features, K input features, M rows, G groups of 32 input features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels.runtime.errors import KernelError

GROUP = 32


def quantize_channels(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 `[N, K]` from -127 to 127 and float32 scales `[N]`: weight ≈ q · scale.

    The largest weight of a channel is exact. Raises `KernelError` on a weight that is not finite.
    """
    weight_NK = _finite(weight_NK)
    scale_N = weight_NK.abs().amax(1) / 127
    q_NK = (weight_NK / scale_N.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)).round_()
    return q_NK.to(torch.int8), scale_N


def quantize_groups(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 `[N, 32 G]` from -8 to 7, padded with zeros, and bfloat16 scales `[N, G]`.

    weight ≈ q · scale. A group's scale makes its largest weight -8, as in llama.cpp's Q4_0, or
    -8.5, -7.5 or 7.5 where that has a smaller squared error. Raises `KernelError` on a weight that
    is not finite.
    """
    weight_NK = _finite(weight_NK)
    group_NGk = F.pad(weight_NK, (0, -weight_NK.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    largest_NG = group_NGk.gather(2, group_NGk.abs().argmax(2, keepdim=True)).squeeze(2)
    best_q, best_scale, best_error = _round_groups(group_NGk, largest_NG / -8)
    for steps in (-8.5, -7.5, 7.5):
        q_NGk, scale_NG, error_NG = _round_groups(group_NGk, largest_NG / steps)
        better_NG = error_NG < best_error
        best_q = torch.where(better_NG.unsqueeze(2), q_NGk, best_q)
        best_scale = torch.where(better_NG, scale_NG, best_scale)
        best_error = torch.where(better_NG, error_NG, best_error)
    return best_q.flatten(1).to(torch.int8), best_scale


def round_trip(x_MK: Tensor, group: int | None, top: int = 127) -> Tensor:
    """Return float32 input as the integer kernels round it: steps of a scale per row or group.

    With `group` None there is one scale per row, else one per `group` inputs of a row, whose
    largest becomes `top`. Rows (or groups) that hold a value that is not finite become NaN.
    """
    columns = x_MK.shape[1]
    if columns == 0:
        return x_MK
    size = columns if group is None else group
    x_MGk = F.pad(x_MK, (0, -columns % size)).unflatten(1, (-1, size))
    scale_MG1 = x_MGk.abs().amax(2, keepdim=True) / top
    inverse_MG1 = torch.where(scale_MG1 >= 1.2e-38, 1 / scale_MG1, 0.0)
    rounded = (x_MGk * inverse_MG1).round_() * scale_MG1
    return torch.where(scale_MG1.isfinite(), rounded, torch.nan).flatten(1)[:, :columns]


def _round_groups(group_NGk: Tensor, scale_NG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale_NG = scale_NG.to(torch.bfloat16)
    wide_NG1 = scale_NG.float().unsqueeze(2)
    q_NGk = torch.where(wide_NG1 == 0, 0.0, group_NGk / wide_NG1).round_().clamp_(-8, 7)
    return q_NGk, scale_NG, (q_NGk * wide_NG1 - group_NGk).square_().sum(2)


def _finite(weight_NK: Tensor) -> Tensor:
    weight_NK = weight_NK.float()
    if not bool(weight_NK.isfinite().all()):
        row, column = (~weight_NK.isfinite()).nonzero()[0].tolist()
        value = float(weight_NK[row, column])
        raise KernelError(
            f"weight_NK[{row}, {column}]: {value} must be finite; repair the checkpoint"
        )
    return weight_NK
