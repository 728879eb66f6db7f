"""Merge calls of one denoiser: which of them fit, how they are batched, how answers are split.

A call is what a pipeline passes to its denoiser, by parameter name. Its rows are the first
dimension of the denoiser's first parameter, the noisy latents, or their number where it is a list
with one tensor for each row. Tensors with as many rows are concatenated, and so are lists with an
entry for each row; a timestep shared by all rows is expanded to each, everything else must be equal.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Call = Mapping[str, Any]

_TIME_PARAMETERS = frozenset({"timestep", "timesteps"})
# Positions of a sequence: their first dimension is no batch dimension, though it may be as long.
_POSITION_PARAMETERS = frozenset(
    {"img_ids", "txt_ids", "image_rotary_emb", "position_ids", "visual_rope_pos", "text_rope_pos"}
)
# Lists with an entry for each row: latents, texts and images of Z-Image, sizes of Qwen-Image.
_LIST_PARAMETERS = frozenset(
    {"x", "cap_feats", "siglip_feats", "image_noise_mask", "img_shapes", "txt_seq_lens"}
)
# Of these, those whose entries may have different lengths in one pass.
_RAGGED_PARAMETERS = frozenset({"cap_feats", "txt_seq_lens"})
# What ControlNets add within the denoiser: a call without them gets zeros, which change nothing.
_RESIDUAL_PARAMETERS = frozenset(
    {
        "down_block_additional_residuals",
        "mid_block_additional_residual",
        "controlnet_block_samples",
        "controlnet_single_block_samples",
        "block_controlnet_hidden_states",
    }
)
# Tensors whose rows are not their first dimension: HiDream's texts of several layers.
_ROW_DIMENSIONS = {"encoder_hidden_states_llama3": 1}


def rows_of(call: Call) -> int:
    """Return the number of batch rows of a call."""
    first = next(iter(call.values()))
    return len(first) if isinstance(first, (list, tuple)) else int(first.shape[0])


def merge_key(call: Call) -> Hashable:
    """Return a key: calls with equal keys can be merged."""
    rows = rows_of(call)
    return tuple(
        (name, _shape(name, value, rows))
        for name, value in call.items()
        if name not in _RESIDUAL_PARAMETERS
    )


def merge_calls(calls: Sequence[Call]) -> dict[str, Any]:
    """Return one call for all, in order. A single call is returned unchanged."""
    if len(calls) == 1:
        return dict(calls[0])
    rows = [rows_of(call) for call in calls]
    calls = _with_residuals(calls, rows)
    return {name: _join(name, [call[name] for call in calls], rows) for name in calls[0]}


def split_output(answer: Any, rows: Sequence[int]) -> list[Any]:
    """Return the answer of each call.

    `answer` is a tensor, or a tuple, list or mapping (diffusers' outputs) of tensors.
    """
    if isinstance(answer, Tensor):
        return list(answer.split(list(rows)))
    if isinstance(answer, Mapping):
        parts = {name: split_output(value, rows) for name, value in answer.items()}
        return [
            type(answer)(**{name: values[index] for name, values in parts.items()})
            for index in range(len(rows))
        ]
    if _is_list_of_rows(answer, sum(rows)):
        ends = list(itertools.accumulate(rows, initial=0))
        return [answer[start:end] for start, end in itertools.pairwise(ends)]
    if isinstance(answer, (tuple, list)):
        return [
            type(answer)(values)
            for values in zip(*(split_output(value, rows) for value in answer), strict=True)
        ]
    return [answer] * len(rows)


def _with_residuals(calls: Sequence[Call], rows: Sequence[int]) -> Sequence[Call]:
    """Return the calls, those without residuals with zeros in the form of the others'."""
    given = {name: call[name] for call in calls for name in _RESIDUAL_PARAMETERS if name in call}
    return [
        {**call, **{name: _zeros(like, count) for name, like in given.items() if name not in call}}
        for call, count in zip(calls, rows, strict=True)
    ]


def _zeros(like: Any, rows: int) -> Any:
    return entrywise(lambda entry: entry.new_zeros(rows, *entry.shape[1:]), like)


def entrywise(compute: Callable[..., Any], *values: Any) -> Any:
    """Return `compute` of tensors, or of the entries of tuples, once for entries that are the same.

    One tensor may be the residual of several blocks.
    """
    if not isinstance(values[0], (tuple, list)):
        return compute(*values)
    made = dict[tuple[int, ...], Any]()
    for entries in zip(*values, strict=True):
        if (key := tuple(map(id, entries))) not in made:
            made[key] = compute(*entries)
    return tuple(made[tuple(map(id, entries))] for entries in zip(*values, strict=True))


def _shape(name: str, value: Any, rows: int) -> Hashable:
    if isinstance(value, Tensor):
        if _is_time(name, value):
            return ("time", value.dtype)
        if _has_rows(name, value, rows):
            axis = _ROW_DIMENSIONS.get(name, 0)
            return ("rows", value.dtype, value.shape[:axis], value.shape[axis + 1 :])
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return ("same", value.dtype, value.shape, hashlib.blake2b(content).digest())
    if isinstance(value, Mapping):
        return tuple((key, _shape(key, entry, rows)) for key, entry in value.items())
    if name in _LIST_PARAMETERS and isinstance(value, list) and len(value) == rows:
        if name in _RAGGED_PARAMETERS:
            return ("ragged",)
        return ("rows", _entry_shape(value[0]))
    if isinstance(value, (tuple, list)):
        return tuple(_shape(name, entry, rows) for entry in value)
    try:
        hash(value)
    except TypeError:
        return ("alone", id(value))
    return (type(value), value)


def _join(name: str, values: list[Any], rows: list[int]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        if _is_time(name, first):
            return torch.cat(
                [value.reshape(-1).expand(count) for value, count in zip(values, rows, strict=True)]
            )
        if not _has_rows(name, first, rows[0]):
            return first
        return torch.cat(values, _ROW_DIMENSIONS.get(name, 0))
    if isinstance(first, Mapping):
        return {key: _join(key, [value[key] for value in values], rows) for key in first}
    if name in _LIST_PARAMETERS and isinstance(first, list) and len(first) == rows[0]:
        return [entry for value in values for entry in value]
    if isinstance(first, (tuple, list)):
        return type(first)(
            entrywise(lambda *entries: _join(name, list(entries), rows), *map(tuple, values))
        )
    return first


def _is_time(name: str, value: Tensor) -> bool:
    """Return True for a timestep of all rows or of each; one for each token is as other tensors."""
    return name in _TIME_PARAMETERS and value.ndim < 2


def _has_rows(name: str, value: Tensor, rows: int) -> bool:
    axis = _ROW_DIMENSIONS.get(name, 0)
    return name not in _POSITION_PARAMETERS and value.ndim > axis and value.shape[axis] == rows


def _entry_shape(entry: Any) -> Hashable:
    """Return what entries of a list with one for each row must have in common."""
    if isinstance(entry, list):
        return tuple(map(_entry_shape, entry))
    return (entry.dtype, entry.shape) if isinstance(entry, Tensor) else repr(entry)


def _is_list_of_rows(answer: Any, rows: int) -> bool:
    """Return True for Z-Image's answer: a list of one tensor without a row dimension for each row."""
    return (
        isinstance(answer, list)
        and len(answer) == rows
        and all(isinstance(entry, Tensor) for entry in answer)
    )
