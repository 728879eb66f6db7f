"""Sample the next token of each row of logits: logit edits, filters, draws and log-probabilities.

Order: the mask of allowed tokens, temperature, top-k, top-p, min-p, draw; each filter sees the
distribution that the one before it left, as in transformers. Draws are Gumbel-max over `noise`.
Temperature 0 takes the most likely token.

Kernels on GPUs do not sort: draws from all tokens are one pass; filters search for their threshold
among the candidate tokens (`gpu/candidates.py`). They keep the same tokens as the twins, except
among tokens of equal logits of which a filter keeps only some: there they keep those of lower ids,
where the twins keep those that `torch.topk` puts first. So they draw the same tokens, up to the
rounding of a logarithm. On the CPU greedy rows and draws from all tokens are one native pass, masks
included; rows with filters use the twin.

Shapes: R rows, V vocabulary, C candidates per row (most likely first), L rows whose
log-probabilities are requested, N alternatives, E edits, W words of 32 tokens, the lowest bit
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.runtime.arguments import GPU_FLOATS, is_cpu
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.native import Kernel
from motet_kernels.sampling.choice import Choice, Edits, Logprobs
from motet_kernels.sampling.noise import gumbel, streams

_DRAW = Kernel("motet_draw", "pipppipii")

FIRST_CANDIDATES = 256
CACHED_NOISE = 1 << 16  # elements of 8 bytes


def edit(logits_RV: Tensor, edits: Edits) -> Tensor:
    """Return a float32 copy of the logits with all edits applied.

    Raises `KernelError` on columns of other types or lengths, and on a row or token that is out of
    range.
    """
    _check_logits(logits_RV)
    for (name, column), dtype in zip(
        edits._asdict().items(), (np.int32,) * 2 + (np.float32,) * 3, strict=True
    ):
        if column.dtype != dtype or column.shape != edits.rows.shape[:1]:
            raise KernelError(
                f"{name}: {column.dtype} {list(column.shape)} must be {np.dtype(dtype)} [E], as rows"
            )
    for name, column, limit in zip(("rows", "tokens"), edits[:2], logits_RV.shape, strict=True):
        if len(column) and not 0 <= column.min() <= column.max() < limit:
            raise KernelError(f"{name}: {column.min()} to {column.max()} must be 0 to {limit - 1}")
    if gpu.takes(logits_RV):
        from motet_kernels.gpu.sampling import sampling as kernels

        return kernels.edit(logits_RV, edits)
    return edit_torch(logits_RV, edits)


def forbid(logits_RV: Tensor, bits_RW: Tensor) -> Tensor:
    """Return a copy of the logits with -inf where a token's bit is not set.

    The bits are int32 on the same device. Raises `KernelError` on bits of another type or device,
    or too few of them.
    """
    _check_logits(logits_RV)
    _check_bits(bits_RW, logits_RV)
    if gpu.takes(logits_RV):
        from motet_kernels.gpu.sampling import sampling as kernels

        return kernels.forbid(logits_RV, bits_RW)
    return forbid_torch(logits_RV, bits_RW)


def draw(logits_RV: Tensor, choices: Sequence[Choice], bits_RW: Tensor | None = None) -> Tensor:
    """Return token ids, int64 `[R]`, on the logits' device; -1 where a row cannot be drawn from.

    Such a row has NaN or +inf, or nothing but -inf. `bits_RW` is a mask as in `forbid`; tokens that
    it excludes are neither drawn nor read. `logits_RV` are rows of float32, bfloat16 or float16 and
    are not modified. Raises `KernelError` on others, and on masks that `forbid` refuses.
    """
    _check_logits(logits_RV)
    if bits_RW is not None:
        _check_bits(bits_RW, logits_RV)
    if len(choices) != len(logits_RV):
        raise KernelError(
            f"choices: {len(choices)} must be as many as rows of logits_RV, {len(logits_RV)}"
        )
    if gpu.takes(logits_RV):
        from motet_kernels.gpu.sampling import sampling as kernels

        return kernels.draw(
            logits_RV if bits_RW is None else kernels.forbid(logits_RV, bits_RW), choices
        )
    native = _DRAW.native() if is_cpu(logits_RV) and logits_RV.dtype == torch.float32 else None
    if native is None:
        return draw_torch(logits_RV, choices, bits_RW)
    return _draw_native(native, logits_RV, choices, bits_RW)


def _draw_native(
    native: Callable[..., int], logits_RV: Tensor, choices: Sequence[Choice], bits_RW: Tensor | None
) -> Tensor:
    """Draw with the native kernel, then redraw rows with filters in torch.

    Rows with filters take part in the native pass as greedy ones, because it marks rows that cannot
    be drawn from with -1.
    """
    temperatures_R = torch.tensor(
        [c.temperature if c.draws and not c.filters else 0.0 for c in choices],
        dtype=torch.float32,
    )
    streams_R = streams(
        [choice.seed for choice in choices], [choice.position for choice in choices]
    )
    ids_R = torch.empty(len(logits_RV), dtype=torch.int64)
    rows = (
        logits_RV.data_ptr(),
        logits_RV.stride(0),
        streams_R.data_ptr(),
        temperatures_R.data_ptr(),
    )
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
    """Return log-probabilities of the tokens `ids_R` and up to `most` likely ones in `rows`.

    Results are float32, `ids_R` is int64. Results of a row whose token is -1 are meaningless.
    Raises `KernelError` on ids of another type, shape or device, and on a row that is out of range.
    """
    _check_logits(logits_RV)
    if (
        ids_R.dtype != torch.int64
        or ids_R.shape != logits_RV.shape[:1]
        or ids_R.device != logits_RV.device
    ):
        raise KernelError(
            f"ids_R: {ids_R.dtype} {list(ids_R.shape)} must be int64 [R], R={len(logits_RV)}"
        )
    if rows and not 0 <= min(rows) <= max(rows) < len(logits_RV):
        raise KernelError(f"rows: {min(rows)} to {max(rows)} must be 0 to {len(logits_RV) - 1}")
    most = min(most, logits_RV.shape[1])
    if gpu.takes(logits_RV):
        from motet_kernels.gpu.sampling import logprobs as kernels

        return kernels.logprobs(logits_RV, rows, ids_R, most)
    return logprobs_torch(logits_RV, rows, ids_R, most)


def _check_logits(logits_RV: Tensor) -> None:
    dense = logits_RV.dim() == 2 and (logits_RV.stride(1) == 1 or logits_RV.shape[1] == 1)
    if logits_RV.dtype not in GPU_FLOATS or not dense or not 1 <= logits_RV.shape[1] <= 1 << 24:
        shape = f"{list(logits_RV.shape)}, strides {list(logits_RV.stride())}"
        raise KernelError(
            f"logits_RV: {logits_RV.dtype} {shape}, must be dense rows of floats, 1 to 2**24 tokens"
        )


def _check_bits(bits_RW: Tensor, logits_RV: Tensor) -> None:
    rows, vocab = logits_RV.shape
    fits = (
        bits_RW.dim() == 2
        and len(bits_RW) == rows
        and 32 * bits_RW.shape[1] >= vocab
        and bits_RW.is_contiguous()
    )
    if bits_RW.dtype != torch.int32 or bits_RW.device != logits_RV.device or not fits:
        found = f"{bits_RW.dtype} {list(bits_RW.shape)} on {bits_RW.device}"
        raise KernelError(
            f"bits_RW: {found} must be dense int32 [{rows}, {-(-vocab // 32)} or more] beside logits_RV"
        )


# ------------------------------------------------------------------------------------------------------------- twins
def edit_torch(logits_RV: Tensor, edits: Edits) -> Tensor:
    """Compute `edit` in torch: its twin."""
    rows, tokens, bias, factor, penalty = (
        torch.from_numpy(column).to(logits_RV.device) for column in edits
    )
    edited_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32), copy=True)
    values = edited_RV[rows, tokens] + bias
    values = torch.where(values > 0, values / factor, values * factor)
    edited_RV[rows, tokens] = values - penalty
    return edited_RV


def forbid_torch(logits_RV: Tensor, bits_RW: Tensor) -> Tensor:
    """Compute `forbid` in torch: its twin."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits_RV.device)
    allowed_RV = (
        (bits_RW.unsqueeze(-1) >> shifts)
        .bitwise_and_(1)
        .view(len(bits_RW), -1)[:, : logits_RV.shape[1]]
    )
    return logits_RV.masked_fill(allowed_RV == 0, -torch.inf)


def draw_torch(
    logits_RV: Tensor, choices: Sequence[Choice], bits_RW: Tensor | None = None
) -> Tensor:
    """Compute `draw` in torch: its twin."""
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
    return ids_R.masked_fill_(~logits_RV.amax(-1).isfinite(), -1)  # amax propagates NaN


def _most_likely(logits_RV: Tensor, _choices: Sequence[Choice]) -> Tensor:
    return logits_RV.argmax(-1)


def _draw_plain(logits_RV: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Return token ids `[R]` drawn from all tokens.

    Rows are processed a few at a time, so that their noise stays in the CPU's caches.
    """
    vocab = logits_RV.shape[1]
    scaled_RV = logits_RV / _column([choice.temperature for choice in choices], logits_RV)
    rows = max(1, CACHED_NOISE // vocab)
    drawn = []
    for start in range(0, len(choices), rows):
        part = choices[start : start + rows]
        noise_RV = _noise(
            part, torch.arange(vocab, device=logits_RV.device).expand(len(part), vocab)
        )
        drawn.append((noise_RV + scaled_RV[start : start + rows]).argmax(-1))
    return torch.cat(drawn)


def _draw_filtered(logits_RV: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Return token ids `[R]` drawn from the tokens that pass top-k, top-p and min-p."""
    scaled_RC, tokens_RC = filtered_candidates(logits_RV, choices)
    best_R1 = (scaled_RC + _noise(choices, tokens_RC)).argmax(-1, keepdim=True)
    return tokens_RC.gather(1, best_R1).squeeze(1)


def filtered_candidates(logits_RV: Tensor, choices: Sequence[Choice]) -> tuple[Tensor, Tensor]:
    """Return scaled logits and token ids `[R, C]`, most likely first; dropped tokens are -inf.

    Sorting a vocabulary costs more than a small model, so the first `FIRST_CANDIDATES` tokens, or the largest
    top-k if that is more, are tried before all of them: they suffice if the last of them is dropped
    in every row, since then all tokens after it are dropped too. All tokens that top-k keeps are
    among them, because top-p is a share of their sum.
    """
    scaled_RV = logits_RV / _column([choice.temperature for choice in choices], logits_RV)
    narrow = max([FIRST_CANDIDATES, *(choice.top_k for choice in choices)])
    for width in (narrow, scaled_RV.shape[1]):
        scaled_RC, tokens_RC = scaled_RV.topk(min(width, scaled_RV.shape[1]))
        _filter(scaled_RC, scaled_RV, choices)
        if scaled_RC[:, -1].isneginf().all():
            break
    return scaled_RC, tokens_RC


def _filter(scaled_RC: Tensor, scaled_RV: Tensor, choices: Sequence[Choice]) -> None:
    """Set candidates that top-k, top-p and min-p drop to -inf, in place.

    The most likely one always stays.
    """
    top_k = _column([choice.top_k or scaled_RV.shape[1] for choice in choices], scaled_RV)
    top_p = _column([choice.top_p for choice in choices], scaled_RV)
    dropped_RC = torch.arange(scaled_RC.shape[1], device=scaled_RC.device) >= top_k
    kept_RC = scaled_RC.masked_fill(dropped_RC, -torch.inf)
    # top-p is a share of the tokens that top-k keeps: of all tokens where top-k is off.
    total_R1 = kept_RC.logsumexp(-1, keepdim=True)
    total_R1 = torch.where(
        top_k > scaled_RC.shape[1], scaled_RV.logsumexp(-1, keepdim=True), total_R1
    )
    probs_RC = (kept_RC - total_R1).exp()
    # A token is kept while those before it sum to less than top_p. At top_p = 1 rounding must not
    # drop the tail.
    dropped_RC |= (probs_RC.cumsum(-1) - probs_RC >= top_p) & (top_p < 1)
    dropped_RC |= (
        probs_RC < _column([choice.min_p for choice in choices], scaled_RV) * probs_RC[:, :1]
    )
    dropped_RC[:, 0] = False
    scaled_RC.masked_fill_(dropped_RC, -torch.inf)


def _noise(choices: Sequence[Choice], tokens_RC: Tensor) -> Tensor:
    found = streams([choice.seed for choice in choices], [choice.position for choice in choices])
    return gumbel(found.to(tokens_RC.device), tokens_RC)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def logprobs_torch(logits_RV: Tensor, rows: Sequence[int], ids_R: Tensor, most: int) -> Logprobs:
    """Compute `logprobs` in torch: its twin."""
    rows_LV = logits_RV[list(rows)]
    logprobs_LV = rows_LV.to(torch.promote_types(rows_LV.dtype, torch.float32)).log_softmax(-1)
    chosen_L1 = logprobs_LV.gather(1, ids_R[list(rows)].clamp(min=0).unsqueeze(1))
    return Logprobs(chosen_L1.squeeze(1), *logprobs_LV.topk(most))
