"""The next token of each row of logits.

Order: logit bias and min_tokens, repetition, presence and frequency penalties, temperature, top-k, top-p, min-p, draw:
each filter sees the distribution that the one before it left, as in transformers. Draws are Gumbel-max over noise
keyed by (seed, output position, token). Temperature 0 takes the most likely token after bias and penalties.

Log-probabilities are of the model's own distribution, before all of the above, as OpenAI's API has them: they say what
the model thinks, not what the sampling options make of it.

Shapes: R rows, V vocabulary, C candidates per row (most likely first).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motet_shared.messages import Sampling, TokenLogprob

from .noise import gumbel
from .request import Request

GREEDY_BELOW = 1e-5  # a temperature that small is meant as 0, and would overflow float32
NARROW = 256
CACHED_NOISE = 1 << 16  # numbers of 8 bytes


@dataclass(slots=True)
class Sampled:
    """One entry per row. `ids[row]` is None where the logits had NaN or infinities: nothing can be drawn there."""

    ids: list[int | None]
    logprobs: list[TokenLogprob | None]


def sample(logits_RV: Tensor, requests: list[Request]) -> Sampled:
    """Draw one token per row. `requests[r]` tells how, and what stands before it. `logits_RV` is left as it is."""
    logits_RV = logits_RV.float()
    top_R = logits_RV.amax(-1)  # carries NaN along
    edited_RV = _edit(logits_RV, requests)
    ids_R = edited_RV.argmax(-1)
    for rows, draw in zip(_by_filters(requests), (_draw_plain, _draw_filtered), strict=True):
        if rows:
            rows_RV = edited_RV if len(rows) == len(requests) else edited_RV[rows]
            ids_R[rows] = draw(rows_RV, [requests[row] for row in rows])
    ids: list[int | None] = ids_R.tolist()
    for row, finite in enumerate(top_R.isfinite().tolist()):
        if not finite:
            ids[row] = None
    return Sampled(ids, _logprobs(logits_RV, requests, ids))


# ------------------------------------------------------------------------------------------------ bias and penalties
def _edit(logits_RV: Tensor, requests: list[Request]) -> Tensor:
    """The logits after bias, min_tokens and penalties; a copy if any row has some."""
    edited = [row for row, request in enumerate(requests) if _edits(request)]
    if not edited:
        return logits_RV
    logits_RV = logits_RV.clone()
    for row in edited:
        _edit_row(logits_RV[row], requests[row])
    return logits_RV


def _edits(request: Request) -> bool:
    s = request.sampling
    return bool(
        s.logit_bias
        or s.presence_penalty
        or s.frequency_penalty
        or s.repetition_penalty != 1.0
        or (s.min_tokens and request.num_output < s.min_tokens)
    )


def _edit_row(logits_V: Tensor, request: Request) -> None:
    s = request.sampling
    if s.logit_bias:
        logits_V[list(s.logit_bias)] += torch.tensor(list(s.logit_bias.values()), dtype=logits_V.dtype)
    if request.num_output < s.min_tokens and request.stop_ids:
        logits_V[list(request.stop_ids)] = -torch.inf
    if s.repetition_penalty != 1.0:
        seen = torch.tensor(request.tokens).unique()
        scores = logits_V[seen]
        logits_V[seen] = torch.where(scores > 0, scores / s.repetition_penalty, scores * s.repetition_penalty)
    if (s.presence_penalty or s.frequency_penalty) and request.num_output:
        tokens, counts = torch.tensor(request.output).unique(return_counts=True)
        logits_V[tokens] -= s.presence_penalty + s.frequency_penalty * counts


# -------------------------------------------------------------------------------------------------- filters and draw
def _by_filters(requests: list[Request]) -> tuple[list[int], list[int]]:
    """Rows that draw from all tokens, and rows that draw from what filters leave. Greedy rows are in neither."""
    plain: list[int] = []
    filtered: list[int] = []
    for row, request in enumerate(requests):
        s = request.sampling
        if s.temperature >= GREEDY_BELOW:
            (filtered if s.top_k or s.top_p < 1 or s.min_p else plain).append(row)
    return plain, filtered


def _draw_plain(logits_RV: Tensor, requests: list[Request]) -> Tensor:
    """Token ids `[R]` drawn from all tokens, a few rows at a time: their noise is to stay in the caches."""
    vocab = logits_RV.shape[1]
    scaled_RV = logits_RV / _column([request.sampling.temperature for request in requests])
    rows = max(1, CACHED_NOISE // vocab)
    drawn = []
    for start in range(0, len(requests), rows):
        part = requests[start : start + rows]
        noise_RV = _noise(part, torch.arange(vocab).expand(len(part), vocab))
        drawn.append((noise_RV + scaled_RV[start : start + rows]).argmax(-1))
    return torch.cat(drawn)


def _draw_filtered(logits_RV: Tensor, requests: list[Request]) -> Tensor:
    """Token ids `[R]` drawn from what top-k, top-p and min-p leave."""
    scaled_RV = logits_RV / _column([request.sampling.temperature for request in requests])
    scaled_RC, tokens_RC = _survivors(scaled_RV, [request.sampling for request in requests])
    best_R1 = (scaled_RC + _noise(requests, tokens_RC)).argmax(-1, keepdim=True)
    return tokens_RC.gather(1, best_R1).squeeze(1)


def _survivors(scaled_RV: Tensor, samplings: list[Sampling]) -> tuple[Tensor, Tensor]:
    """Logits and ids `[R, C]`, most likely first; -inf where a filter drops a token.

    Sorting a vocabulary costs more than a small model, so the first `NARROW` tokens are tried before all of them:
    they are enough if the last of them is dropped in every row, since then so is everything behind it.
    """
    for width in (NARROW, scaled_RV.shape[1]):
        scaled_RC, tokens_RC = scaled_RV.topk(min(width, scaled_RV.shape[1]))
        _filter(scaled_RC, scaled_RV, samplings)
        if scaled_RC[:, -1].isneginf().all():
            break
    return scaled_RC, tokens_RC


def _filter(scaled_RC: Tensor, scaled_RV: Tensor, samplings: list[Sampling]) -> None:
    """Set the candidates that top-k, top-p and min-p drop to -inf, in place. The most likely one always stays."""
    top_k, top_p = _column([s.top_k or scaled_RV.shape[1] for s in samplings]), _column([s.top_p for s in samplings])
    dropped_RC = torch.arange(scaled_RC.shape[1]) >= top_k
    kept_RC = scaled_RC.masked_fill(dropped_RC, -torch.inf)
    # top-p is a share of what top-k leaves: of all tokens where top-k does not cut.
    total_R1 = kept_RC.logsumexp(-1, keepdim=True)
    total_R1 = torch.where(top_k > scaled_RC.shape[1], scaled_RV.logsumexp(-1, keepdim=True), total_R1)
    probs_RC = (kept_RC - total_R1).exp()
    # A token stays while those before it do not reach top_p. At top_p = 1 rounding must not drop the tail.
    dropped_RC |= (probs_RC.cumsum(-1) - probs_RC >= top_p) & (top_p < 1)
    dropped_RC |= probs_RC < _column([s.min_p for s in samplings]) * probs_RC[:, :1]
    dropped_RC[:, 0] = False
    scaled_RC.masked_fill_(dropped_RC, -torch.inf)


def _noise(requests: list[Request], tokens_RC: Tensor) -> Tensor:
    return gumbel([r.sampling.seed for r in requests], [r.num_output for r in requests], tokens_RC)


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


# -------------------------------------------------------------------------------------------------- log-probabilities
def _logprobs(logits_RV: Tensor, requests: list[Request], ids: list[int | None]) -> list[TokenLogprob | None]:
    result: list[TokenLogprob | None] = [None] * len(requests)
    for row, (request, token) in enumerate(zip(requests, ids, strict=True)):
        wanted = request.sampling.logprobs
        if wanted < 0 or token is None:
            continue
        logprobs_V = logits_RV[row].log_softmax(-1)
        top = logprobs_V.topk(min(wanted, len(logprobs_V)))
        pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        result[row] = TokenLogprob(token, float(logprobs_V[token]), pairs)
    return result
