"""Compute a tower's attention on a GPU: one launch per layer for a batch, without device syncs.

On a CPU with instructions for bfloat16, towers of that type use it too: it is twice as fast as torch's.

Towers that use transformers' `AttentionInterface` call this in two ways: pictures of one size as
`[B, H, T, D]`, pictures in their own resolution as one row `[1, H, N, D]` with the bounds of its
parts, which are on the CPU. B pictures · T tokens of each · N of all · H heads · D numbers per
head.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from motet_kernels import gpu
from motet_kernels.attention.full_attention import packed_attention
from motet_kernels.runtime import native
from motet_kernels.spans import Spans

# Qwen's towers pass all parts of a row at once to an implementation with "flash" in its name; to
# any other they pass one part after the other, reading the bounds from the device in every layer.
NAME = "motet_flash_rows"


def prefers_packed_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if towers of `dtype` on `device` are faster with `packed_attention`."""
    return gpu.is_gpu(device) or (dtype == torch.bfloat16 and native.is_multiplying_bfloat16())


def use_packed_attention(towers: PreTrainedModel) -> None:
    """Make the tower of a model use `packed_attention`."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    towers.config.vision_config._attn_implementation = NAME


def attend(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return `[B, T, H, D]`: each token attends to its own picture, or to its part of the row."""
    if attention_mask is not None:  # pictures that do not fill their frame
        attended = F.scaled_dot_product_attention(
            query_BHTD, key_BHTD, value_BHTD, attn_mask=attention_mask, scale=scaling
        )
        return attended.transpose(1, 2), None
    batch, _, tokens, _ = query_BHTD.shape
    bounds = (
        range(0, batch * tokens + 1, tokens) if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    )
    query, key, value = (
        part.transpose(1, 2).flatten(0, 1) for part in (query_BHTD, key_BHTD, value_BHTD)
    )
    out_NHD = packed_attention(
        query, key, value, _spans(tuple(bounds), query.device), scale=scaling
    )
    return out_NHD.unflatten(0, (batch, tokens)), None


@lru_cache(maxsize=8)
def _spans(bounds: tuple[int, ...], device: torch.device) -> Spans:
    """Return the spans, cached since all layers of a tower use the same ones."""
    return Spans(bounds, device)
