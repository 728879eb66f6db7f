"""Time words: dynamic time warping over cross-attention, and grouping of tokens into words.

N tokens · H heads · F encoder frames. Source: the word timestamps of Whisper's reference
implementation; the token times equal those of transformers' `return_token_timestamps`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from motet_asr.engine.request import Word

UNSPACED = frozenset(
    {"zh", "ja", "th", "lo", "my", "yue"}
)  # languages without spaces between words
_PUNCTUATION = frozenset("\"'.。,，!！?？:：”)]}、;；…")


def token_ends(attention_NHF: Tensor, seconds_per_frame: float, filter_width: int) -> list[float]:
    """Return each token's end in seconds.

    The last end is repeated for the final token, after which nothing was decoded.
    """
    weights = attention_NHF.permute(1, 0, 2)
    deviation = torch.std(weights, dim=1, keepdim=True, unbiased=False)
    weights = (weights - weights.mean(dim=1, keepdim=True)) / deviation
    matrix_NF = _smoothed(weights, filter_width).mean(dim=0)
    tokens, frames = warp(-matrix_NF.double().numpy())
    token_starts = np.flatnonzero(np.diff(tokens, prepend=-1))
    ends = (frames[token_starts] * seconds_per_frame).tolist()
    return [*ends, ends[-1]]


def _smoothed(inputs: Tensor, width: int) -> Tensor:
    """Apply a median filter of `width` along the last dimension."""
    pad = width // 2
    if inputs.shape[-1] <= pad:
        return inputs
    padded = F.pad(inputs, (pad, pad), mode="reflect")
    return padded.unfold(-1, width, 1).sort()[0][..., pad]


def warp(cost_NF: Any) -> tuple[Any, Any]:
    """Find the cheapest path through a cost matrix that goes down and right.

    Returns row and column of its cells, in order. Anti-diagonals depend only on the two before
    them, so that each is one vector operation.
    """
    rows, columns = cost_NF.shape
    total = np.full((rows + 1, columns + 1), np.inf, dtype=np.float32)
    trace = np.full((rows + 1, columns + 1), 2, dtype=np.int8)
    total[0, 0] = 0
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        diagonal_cost, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        step = np.where(
            (diagonal_cost < down) & (diagonal_cost < right),
            0,
            np.where((down < diagonal_cost) & (down < right), 1, 2),
        )
        total[i, j] = cost_NF[i - 1, j - 1] + np.choose(step, (diagonal_cost, down, right))
        trace[i, j] = step
    trace[0, :], trace[:, 0] = 2, 1
    return _walk_back(trace, rows, columns)


def _walk_back(trace: Any, i: int, j: int) -> tuple[Any, Any]:
    cells = []
    while i > 0 or j > 0:
        cells.append((i - 1, j - 1))
        step = trace[i, j]
        i, j = i - (step != 2), j - (step != 1)
    path = np.array(cells[::-1])
    return path[:, 0], path[:, 1]


def group_tokens(
    tokens: Sequence[int], decode: Callable[[list[int]], str], spaced: bool
) -> list[tuple[str, list[int]]]:
    """Group tokens into words; return each word with its token indices.

    Characters are kept whole; a punctuation mark belongs to the word before it.
    """
    words: list[tuple[str, list[int]]] = []
    indices: list[int] = []
    for index in range(len(tokens)):
        indices.append(index)
        text = decode([tokens[i] for i in indices])
        if "\ufffd" in text and index < len(tokens) - 1 and len(indices) < 8:
            continue  # part of a character
        if not text:
            continue
        begins = not words or (
            text[0].isspace() if spaced else not set(text.strip()) <= _PUNCTUATION
        )
        if begins:
            words.append((text, indices))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1] + indices)
        indices = []
    return words


def spread(text: str, start: float, end: float, spaced: bool = True) -> list[Word]:
    """Return words with rough times, proportional to their letters, for models without word times."""
    parts = _split(text, spaced)
    letters = sum(len(part) for part in parts)
    words, position = [], start
    for part in parts:
        after = position + (end - start) * len(part) / letters
        words.append(Word(part, position, after))
        position = after
    return words


def _split(text: str, spaced: bool) -> list[str]:
    if not spaced:
        return [char for char in text if not char.isspace()]
    parts: list[str] = []
    for index, part in enumerate(text.split()):
        parts.append(part if index == 0 and not text[0].isspace() else " " + part)
    return parts
