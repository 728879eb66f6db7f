"""Attend within pictures in both directions: Gemma 3's tokens of a picture see all of it.

The tokens of a picture are computed in one step (`ImageEmbeddings.uncut`). The layer first attends
causally as for text, which is right for all other tokens; then the picture's own tokens are computed
here, from keys and values that the step has already stored.

Shapes: n tokens of a picture in a step, T keys, H heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motet_kernels.attention.kv_format import CODED, decode
from motet_llm.cache.kv_cache import KvCache

from .options import AttentionOptions


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """Locate the tokens of one picture in a step.

    rows: its tokens among the packed ones.
    first: position of the first of them; a prefix of the picture may have been cached.
    start, stop: positions of the whole picture.
    tables: block tables of its request, one for each group of layers.
    """

    rows: slice
    first: int
    start: int
    stop: int
    tables: Sequence[Sequence[int]]


def attend_spans(
    kv: KvCache,
    layer: int,
    query_NHD: Tensor,
    out_NHV: Tensor,
    spans: Sequence[PictureSpan],
    scale: float,
    options: AttentionOptions,
) -> None:
    """Overwrite in `out_NHV` the attention of pictures' tokens by that in both directions."""
    for span in spans:
        window = options.window
        oldest = 0 if window is None else min(span.start, max(span.first - window + 1, 0))
        table = span.tables[kv.group_of[layer]]
        slots = kv.slots(table, oldest, span.stop)
        key_TKD, value_TKV = (
            decode(rows) if kv.dtype in CODED else rows.float() for rows in kv.pick(layer, slots)
        )
        queries = torch.arange(span.first, span.stop, device=slots.device)[:, None]
        keys = torch.arange(oldest, span.stop, device=slots.device)
        seen_nT = (keys <= queries) | (keys >= span.start)
        if window is not None:
            seen_nT &= (keys > queries - window) | (keys >= span.start)
        out_NHV[span.rows] = _attend(
            query_NHD[span.rows].float() * scale, key_TKD, value_TKV, seen_nT, options
        ).to(out_NHV.dtype)


def _attend(
    query_nHD: Tensor,
    key_TKD: Tensor,
    value_TKV: Tensor,
    seen_nT: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Return `[n, H, V]` of scaled queries."""
    groups = query_nHD.shape[1] // key_TKD.shape[1]
    key_THD = key_TKD.repeat_interleave(groups, 1)
    scores_HnT = torch.einsum("nhd,thd->hnt", query_nHD, key_THD)
    if options.softcap is not None:
        scores_HnT = options.softcap * torch.tanh(scores_HnT / options.softcap)
    scores_HnT = scores_HnT.masked_fill(~seen_nT, -torch.inf)
    if options.sinks_H is not None:
        sinks_Hn1 = options.sinks_H.float()[:, None, None].expand(-1, len(query_nHD), 1)
        weights_HnT = torch.cat((scores_HnT, sinks_Hn1), dim=-1).softmax(-1)[..., :-1]
    else:
        weights_HnT = scores_HnT.softmax(-1)
    return torch.einsum("hnt,thv->nhv", weights_HnT, value_TKV.repeat_interleave(groups, 1))
