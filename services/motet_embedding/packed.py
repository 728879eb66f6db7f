"""Attend over many texts packed into one row, so that no token is padding.

A model whose attention comes from transformers' `AttentionInterface` computes `[1, N]` tokens of
several texts at once; this attention function and the given positions keep the texts apart. `packs`
tests whether that holds for a model: it must compute two texts in a row as it computes each alone.

N tokens of all texts · S of one · H query heads · K key heads · D numbers per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from motet_kernels.attention.full_attention import packed_attention as attend
from motet_kernels.runtime.device import upload_all
from motet_kernels.spans import Spans

NAME = "motet_packed"
_PROBE = (3, 160, 7)  # tokens: longer than common sliding windows
_TOLERANCE = {torch.float32: 1e-4}
_TOLERANCE_16_BITS = 3e-2
# Keyword arguments that do not change this attention's result.
_IGNORED_ARGUMENTS = {
    "position_ids",
    "use_cache",
    "deterministic",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
}


class CannotPack(Exception):
    """Report that the model requires an attention feature that packed attention lacks."""


@dataclass(slots=True)
class PackedTexts:
    """Hold the spans of the texts in a row, and the sliding windows that the layers requested."""

    spans: Spans
    windows: set[int] = field(default_factory=set)


def packed_attention(
    module: torch.nn.Module,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedTexts | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return `[1, N, H, D]`, each token attending to its own text alone.

    Raises Unpackable for arguments that it does not support.
    """
    unsupported = [
        name
        for name, value in others.items()
        if value is not None and name not in _IGNORED_ARGUMENTS
    ]
    if packed is None or attention_mask is not None or unsupported:
        raise CannotPack(
            f"attention with {', '.join(unsupported) or 'a mask or without its texts'}"
        )
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    if sliding_window:
        packed.windows.add(sliding_window)
    scale = query_1HND.shape[-1] ** -0.5 if scaling is None else scaling
    query_NHD, key_NKD, value_NKD = (
        tensor[0].transpose(0, 1) for tensor in (query_1HND, key_1KND, value_1KND)
    )
    out_NHD = attend(
        query_NHD,
        key_NKD,
        value_NKD,
        packed.spans,
        scale=scale,
        causal=causal,
        window=sliding_window or None,
    )
    return out_NHD[None], None


# ------------------------------------------------------------------------------------------ finding
def first_position(model: PreTrainedModel) -> int:
    """Return the position of a text's first token; RoBERTa and similar count after padding's."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


@torch.inference_mode()
def forward(
    model: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    first: int,
    types: Sequence[Sequence[int]] | None = None,
) -> tuple[Tensor, PackedTexts]:
    """Return `[N, D]`, the last hidden states of the texts one after the other.

    `types`: token types of each text, for models that have them. Raises any exception of a model
    that cannot be packed.
    """
    packed = PackedTexts(Spans.of(map(len, texts), model.device))
    num_tokens = packed.spans.num_tokens
    ids_N = np.fromiter(chain.from_iterable(texts), dtype=np.int64, count=num_tokens)
    positions_N = np.concatenate([np.arange(first, first + len(text)) for text in texts])
    arrays = {"input_ids": ids_N, "position_ids": positions_N}
    if types is not None:
        arrays["token_type_ids"] = np.fromiter(chain.from_iterable(types), np.int64, num_tokens)
    uploaded = upload_all([*arrays.values()], model.device)
    rows = {name: row[None] for name, row in zip(arrays, uploaded, strict=True)}
    output = model(**rows, packed=packed, **_no_cache(model))
    return output.last_hidden_state[0], packed


@torch.inference_mode()
def forward_padded(
    model: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    padding: int,
    types: Sequence[Sequence[int]] | None = None,
    unseen: Sequence[int] = (),
) -> list[Tensor]:
    """Return `[S, D]` of each text, computed as a batch with padding.

    `types`: as for `forward`. `unseen`: how many last tokens of each text no token attends to.
    """
    batch = padded(texts, padding, types, unseen, model.device)
    hidden_BTD = model(**batch, **_no_cache(model)).last_hidden_state
    return [hidden[: len(text)] for hidden, text in zip(hidden_BTD, texts, strict=True)]


def padded(
    texts: Sequence[Sequence[int]],
    padding: int,
    types: Sequence[Sequence[int]] | None,
    unseen: Sequence[int],
    device: torch.device,
) -> dict[str, Tensor]:
    """Return ids, attention mask and token types, if there are any, as rows of equal length."""
    longest = max(map(len, texts))
    attended = [
        len(text) - one for text, one in zip(texts, unseen or [0] * len(texts), strict=True)
    ]
    arrays = {
        "input_ids": np.array([[*text, *[padding] * (longest - len(text))] for text in texts]),
        "attention_mask": np.array([[1] * seen + [0] * (longest - seen) for seen in attended]),
    }
    if types is not None:
        arrays["token_type_ids"] = np.array([[*row, *[0] * (longest - len(row))] for row in types])
    return dict(zip(arrays, upload_all([*arrays.values()], device), strict=True))


def _no_cache(model: PreTrainedModel) -> dict[str, bool]:
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}


def packs(model: PreTrainedModel, limit: int, padding: int) -> bool:
    """Test whether `model` computes packed texts of up to `limit` tokens like each alone.

    If so, the model keeps the packed attention, else it is restored to its own.
    """
    texts = _probe(limit, model.get_input_embeddings().num_embeddings, padding)
    with torch.inference_mode():
        alone = torch.cat([forward_padded(model, [text], padding)[0] for text in texts])
    own = model.config._attn_implementation
    if _matches_alone(model, texts, alone, limit):
        return True
    model.config._attn_implementation = own
    return False


def _matches_alone(
    model: PreTrainedModel, texts: list[list[int]], expected_ND: Tensor, limit: int
) -> bool:
    AttentionInterface.register(NAME, packed_attention)
    model.config._attn_implementation = NAME
    try:
        packed_ND, packed = forward(model, texts, first_position(model))
    except Exception:  # any error about unexpected arguments: the model gets padded batches instead
        return False
    unseen = [window for window in packed.windows if max(map(len, texts)) <= window < limit]
    deviation = (packed_ND.float() - expected_ND.float()).norm() / expected_ND.float().norm()
    return not unseen and bool(deviation < _TOLERANCE.get(model.dtype, _TOLERANCE_16_BITS))


def _probe(limit: int, vocabulary: int, padding: int) -> list[list[int]]:
    tokens = [token for token in range(vocabulary) if token != padding]
    return [
        [tokens[(7 * place + length) % len(tokens)] for place in range(min(length, limit))]
        for length in _PROBE
    ]
