"""The next token of each row of logits: edits of single logits, filters and draws, log-probabilities.

Order: the mask of tokens that may be drawn, temperature, top-k, top-p, min-p, draw: each filter sees the distribution
that the one before it left, as in transformers. Draws are Gumbel-max over `noise`. Temperature 0 takes the most likely
token.

Kernels on GPUs need no sort: draws from all tokens are one pass; filters search for their threshold among the tokens
that can matter (`gpu/candidates.py`). They keep what the twins keep, but for tokens of equal logits of which a filter
keeps only some: there they keep those of lower numbers, where the twins keep those that `torch.topk` puts first.
So they draw the same tokens, up to the rounding of a logarithm. On the CPU greedy rows and draws from all tokens are
one native pass, masks included, rows with filters the twin's.

Shapes: R rows, V vocabulary, C candidates per row (most likely first), L rows of which log-probabilities are wanted,
N alternatives, E edits, W words of 32 tokens, of which the first is the lowest bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import gpu
from .arguments import GPU_FLOATS, is_cpu
from .errors import KernelError
from .native import Kernel
from .noise import gumbel, streams

_DRAW = Kernel("motet_draw", "pipppipii")

GREEDY_BELOW = 1e-5  # a temperature that small is meant as 0, and would overflow float32
NARROW = 256
CACHED_NOISE = 1 << 16  # numbers of 8 bytes


class Choice(NamedTuple):
    """How a row's token is chosen.

    temperature: 0 takes the most likely token, whatever else is said. top_k: 0 for all. top_p, min_p: shares, 1 and 0
    for all. seed, position: of the noise; nothing else decides what is drawn.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0

    @property
    def draws(self) -> bool:
        return self.temperature >= GREEDY_BELOW

    @property
    def filters(self) -> bool:
        return self.draws and bool(self.top_k or self.top_p < 1 or self.min_p)


class Edits(NamedTuple):
    """Changes of single logits, each an array `[E]` of the host; no (row, token) is there twice.

    rows, tokens: int32. A logit gets `bias`, is then divided (where it is negative: multiplied) by `factor`, and at
    last loses `less`, all float32.
    """

    rows: np.ndarray
    tokens: np.ndarray
    bias: np.ndarray
    factor: np.ndarray
    less: np.ndarray


class Logprobs(NamedTuple):
    """Of the tokens that were chosen `[L]`, and of the N most likely ones of each row, these first: `[L, N]`."""

    chosen_L: Tensor
    values_LN: Tensor
    ids_LN: Tensor


def edit(logits_RV: Tensor, edits: Edits) -> Tensor:
    """A float32 copy of the logits with all edits made.

    Raises `KernelError` on columns of other types or lengths, or on a row or token that is not there.
    """
    _check_logits(logits_RV)
    for (name, column), dtype in zip(edits._asdict().items(), (np.int32,) * 2 + (np.float32,) * 3, strict=True):
        if column.dtype != dtype or column.shape != edits.rows.shape[:1]:
            raise KernelError(f"{name}: {column.dtype} {list(column.shape)} must be {np.dtype(dtype)} [E], as rows")
    for name, column, limit in zip(("rows", "tokens"), edits[:2], logits_RV.shape, strict=True):
        if len(column) and not 0 <= column.min() <= column.max() < limit:
            raise KernelError(f"{name}: {column.min()} to {column.max()} must be 0 to {limit - 1}")
    if gpu.takes(logits_RV):
        from .gpu import sampling as kernels

        return kernels.edit(logits_RV, edits)
    return edit_torch(logits_RV, edits)


def forbid(logits_RV: Tensor, bits_RW: Tensor) -> Tensor:
    """A copy of the logits with -inf where a token's bit, in int32 on the same device, is not set.

    Raises `KernelError` on bits of another type or device, or too few of them.
    """
    _check_logits(logits_RV)
    _check_bits(bits_RW, logits_RV)
    if gpu.takes(logits_RV):
        from .gpu import sampling as kernels

        return kernels.forbid(logits_RV, bits_RW)
    return forbid_torch(logits_RV, bits_RW)


def draw(logits_RV: Tensor, choices: Sequence[Choice], bits_RW: Tensor | None = None) -> Tensor:
    """Token ids `[R]`, int64, on the logits' device; -1 where a row has NaN or +inf, or nothing but -inf.

    bits_RW: as `forbid` has them; no other token is drawn, or looked at. `logits_RV` are rows of float32, bfloat16 or
    float16 and are left as they are. Raises `KernelError` on others, and on what `forbid` refuses.
    """
    _check_logits(logits_RV)
    if bits_RW is not None:
        _check_bits(bits_RW, logits_RV)
    if len(choices) != len(logits_RV):
        raise KernelError(f"choices: {len(choices)} must be as many as rows of logits_RV, {len(logits_RV)}")
    if gpu.takes(logits_RV):
        from .gpu import sampling as kernels

        return kernels.draw(logits_RV if bits_RW is None else kernels.forbid(logits_RV, bits_RW), choices)
    native = _DRAW.native() if is_cpu(logits_RV) and logits_RV.dtype == torch.float32 else None
    if native is None:
        return draw_torch(logits_RV, choices, bits_RW)
    return _draw_native(native, logits_RV, choices, bits_RW)


def _draw_native(
    native: Callable[..., int], logits_RV: Tensor, choices: Sequence[Choice], bits_RW: Tensor | None
) -> Tensor:
    """Rows with filters take part as greedy ones, for what it says of them if they cannot be drawn from."""
    temperatures_R = torch.tensor([c.temperature if c.draws and not c.filters else 0.0 for c in choices])
    streams_R = streams([choice.seed for choice in choices], [choice.position for choice in choices])
    ids_R = torch.empty(len(logits_RV), dtype=torch.int64)
    rows = (logits_RV.data_ptr(), logits_RV.stride(0), streams_R.data_ptr(), temperatures_R.data_ptr())
    bits = (0, 0) if bits_RW is None else (bits_RW.data_ptr(), bits_RW.stride(0))
    native(*rows, *bits, ids_R.data_ptr(), *logits_RV.shape)
    if filtered := [row for row, choice in enumerate(choices) if choice.filters]:
        filtered_RV = logits_RV[filtered]
        if bits_RW is not None:
            filtered_RV = forbid_torch(filtered_RV, bits_RW[filtered])
        drawn = _draw_filtered(filtered_RV, [choices[row] for row in filtered])
        ids_R[filtered] = torch.where(ids_R[filtered] < 0, -1, drawn)
    return ids_R


def logprobs(logits_RV: Tensor, rows: Sequence[int], ids_R: Tensor, most: int) -> Logprobs:
    """Log-probabilities, float32, in some rows: of their tokens `ids_R`, int64, and of up to `most` likely ones.

    Whatever is said of a row whose token is -1 means nothing. Raises `KernelError` on a row that is not there.
    """
    _check_logits(logits_RV)
    if ids_R.dtype != torch.int64 or ids_R.shape != logits_RV.shape[:1] or ids_R.device != logits_RV.device:
        raise KernelError(f"ids_R: {ids_R.dtype} {list(ids_R.shape)} must be int64 [R], R={len(logits_RV)}")
    if rows and not 0 <= min(rows) <= max(rows) < len(logits_RV):
        raise KernelError(f"rows: {min(rows)} to {max(rows)} must be 0 to {len(logits_RV) - 1}")
    most = min(most, logits_RV.shape[1])
    if gpu.takes(logits_RV):
        from .gpu import logprobs as kernels

        return kernels.logprobs(logits_RV, rows, ids_R, most)
    return logprobs_torch(logits_RV, rows, ids_R, most)


def _check_logits(logits_RV: Tensor) -> None:
    dense = logits_RV.dim() == 2 and (logits_RV.stride(1) == 1 or logits_RV.shape[1] == 1)
    if logits_RV.dtype not in GPU_FLOATS or not dense or not 1 <= logits_RV.shape[1] <= 1 << 24:
        shape = f"{list(logits_RV.shape)}, strides {list(logits_RV.stride())}"
        raise KernelError(f"logits_RV: {logits_RV.dtype} {shape}, must be dense rows of floats, 1 to 2**24 tokens")


def _check_bits(bits_RW: Tensor, logits_RV: Tensor) -> None:
    rows, vocab = logits_RV.shape
    fits = bits_RW.dim() == 2 and len(bits_RW) == rows and 32 * bits_RW.shape[1] >= vocab and bits_RW.is_contiguous()
    if bits_RW.dtype != torch.int32 or bits_RW.device != logits_RV.device or not fits:
        found = f"{bits_RW.dtype} {list(bits_RW.shape)} on {bits_RW.device}"
        raise KernelError(f"bits_RW: {found} must be dense int32 [{rows}, {-(-vocab // 32)} or more] beside logits_RV")


# ------------------------------------------------------------------------------------------------------------- twins
def edit_torch(logits_RV: Tensor, edits: Edits) -> Tensor:
    """The twin."""
    rows, tokens, bias, factor, less = (torch.from_numpy(column).to(logits_RV.device) for column in edits)
    edited_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32), copy=True)
    values = edited_RV[rows, tokens] + bias
    values = torch.where(values > 0, values / factor, values * factor)
    edited_RV[rows, tokens] = values - less
    return edited_RV


def forbid_torch(logits_RV: Tensor, bits_RW: Tensor) -> Tensor:
    """The twin."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits_RV.device)
    allowed_RV = (bits_RW.unsqueeze(-1) >> shifts).bitwise_and_(1).view(len(bits_RW), -1)[:, : logits_RV.shape[1]]
    return logits_RV.masked_fill(allowed_RV == 0, -torch.inf)


def draw_torch(logits_RV: Tensor, choices: Sequence[Choice], bits_RW: Tensor | None = None) -> Tensor:
    """The twin."""
    if bits_RW is not None:
        logits_RV = forbid_torch(logits_RV, bits_RW)
    logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    ids_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    kinds: dict[Callable[..., Tensor], list[int]] = {}
    for row, choice in enumerate(choices):
        kind = _draw_filtered if choice.filters else _draw_plain if choice.draws else _most_likely
        kinds.setdefault(kind, []).append(row)
    for drawn, rows in kinds.items():
        rows_RV = logits_RV if len(rows) == len(choices) else logits_RV[rows]
        ids_R[rows] = drawn(rows_RV, [choices[row] for row in rows])
    return ids_R.masked_fill_(~logits_RV.amax(-1).isfinite(), -1)  # the maximum carries NaN along


def _most_likely(logits_RV: Tensor, _choices: Sequence[Choice]) -> Tensor:
    return logits_RV.argmax(-1)


def _draw_plain(logits_RV: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Token ids `[R]` drawn from all tokens, a few rows at a time: their noise is to stay in the caches."""
    vocab = logits_RV.shape[1]
    scaled_RV = logits_RV / _column([choice.temperature for choice in choices], logits_RV)
    rows = max(1, CACHED_NOISE // vocab)
    drawn = []
    for start in range(0, len(choices), rows):
        part = choices[start : start + rows]
        noise_RV = _noise(part, torch.arange(vocab, device=logits_RV.device).expand(len(part), vocab))
        drawn.append((noise_RV + scaled_RV[start : start + rows]).argmax(-1))
    return torch.cat(drawn)


def _draw_filtered(logits_RV: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Token ids `[R]` drawn from what top-k, top-p and min-p leave."""
    scaled_RC, tokens_RC = survivors(logits_RV, choices)
    best_R1 = (scaled_RC + _noise(choices, tokens_RC)).argmax(-1, keepdim=True)
    return tokens_RC.gather(1, best_R1).squeeze(1)


def survivors(logits_RV: Tensor, choices: Sequence[Choice]) -> tuple[Tensor, Tensor]:
    """Logits over temperature and ids `[R, C]`, most likely first; -inf where a filter drops a token.

    Sorting a vocabulary costs more than a small model, so the first `NARROW` tokens are tried before all of them:
    they are enough if the last of them is dropped in every row, since then so is everything behind it.
    """
    scaled_RV = logits_RV / _column([choice.temperature for choice in choices], logits_RV)
    for width in (NARROW, scaled_RV.shape[1]):
        scaled_RC, tokens_RC = scaled_RV.topk(min(width, scaled_RV.shape[1]))
        _filter(scaled_RC, scaled_RV, choices)
        if scaled_RC[:, -1].isneginf().all():
            break
    return scaled_RC, tokens_RC


def _filter(scaled_RC: Tensor, scaled_RV: Tensor, choices: Sequence[Choice]) -> None:
    """Set the candidates that top-k, top-p and min-p drop to -inf, in place. The most likely one always stays."""
    top_k = _column([choice.top_k or scaled_RV.shape[1] for choice in choices], scaled_RV)
    top_p = _column([choice.top_p for choice in choices], scaled_RV)
    dropped_RC = torch.arange(scaled_RC.shape[1], device=scaled_RC.device) >= top_k
    kept_RC = scaled_RC.masked_fill(dropped_RC, -torch.inf)
    # top-p is a share of what top-k leaves: of all tokens where top-k does not cut.
    total_R1 = kept_RC.logsumexp(-1, keepdim=True)
    total_R1 = torch.where(top_k > scaled_RC.shape[1], scaled_RV.logsumexp(-1, keepdim=True), total_R1)
    probs_RC = (kept_RC - total_R1).exp()
    # A token stays while those before it do not reach top_p. At top_p = 1 rounding must not drop the tail.
    dropped_RC |= (probs_RC.cumsum(-1) - probs_RC >= top_p) & (top_p < 1)
    dropped_RC |= probs_RC < _column([choice.min_p for choice in choices], scaled_RV) * probs_RC[:, :1]
    dropped_RC[:, 0] = False
    scaled_RC.masked_fill_(dropped_RC, -torch.inf)


def _noise(choices: Sequence[Choice], tokens_RC: Tensor) -> Tensor:
    found = streams([choice.seed for choice in choices], [choice.position for choice in choices])
    return gumbel(found.to(tokens_RC.device), tokens_RC)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def logprobs_torch(logits_RV: Tensor, rows: Sequence[int], ids_R: Tensor, most: int) -> Logprobs:
    """The twin."""
    rows_LV = logits_RV[list(rows)]
    logprobs_LV = rows_LV.to(torch.promote_types(rows_LV.dtype, torch.float32)).log_softmax(-1)
    chosen_L1 = logprobs_LV.gather(1, ids_R[list(rows)].clamp(min=0).unsqueeze(1))
    return Logprobs(chosen_L1.squeeze(1), *logprobs_LV.topk(most))
