"""The next token of each row of logits.

Order: logit bias and min_tokens, repetition, presence and frequency penalties, temperature, top-k, top-p, min-p, draw:
each filter sees the distribution that the one before it left, as in transformers. Draws are Gumbel-max over noise
keyed by (seed, output position, token). Temperature 0 takes the most likely token after bias and penalties.

Log-probabilities are of the model's own distribution, before all of the above, as OpenAI's API has them: they say what
the model thinks, not what the sampling options make of it.

Shapes: R rows, V vocabulary, C candidates per row (most likely first).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from motet_shared.messages import Sampling, TokenLogprob
from torch import Tensor

from .noise import gumbel
from .request import Request


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
    drawn = [row for row, request in enumerate(requests) if request.sampling.temperature > 0]
    if drawn:
        rows_RV = edited_RV if len(drawn) == len(requests) else edited_RV[drawn]
        ids_R[drawn] = _draw(rows_RV, [requests[row] for row in drawn])
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
def _draw(logits_RV: Tensor, requests: list[Request]) -> Tensor:
    """Token ids `[R]` drawn after temperature and filters."""
    samplings = [request.sampling for request in requests]
    scaled_RV = logits_RV / torch.tensor([s.temperature for s in samplings]).unsqueeze(1)
    if any(s.top_k or s.top_p < 1 or s.min_p for s in samplings):
        scaled_RC, tokens_RC = _candidates(scaled_RV, samplings)
        _filter(scaled_RC, samplings)
    else:
        scaled_RC, tokens_RC = scaled_RV, torch.arange(scaled_RV.shape[1]).expand_as(scaled_RV)
    positions = [request.num_output for request in requests]
    noise_RC = gumbel([s.seed for s in samplings], positions, tokens_RC)
    best_R1 = (scaled_RC + noise_RC).argmax(-1, keepdim=True)
    return tokens_RC.gather(1, best_R1).squeeze(1)


def _candidates(scaled_RV: Tensor, samplings: list[Sampling]) -> tuple[Tensor, Tensor]:
    """The tokens that can survive, most likely first: the largest top_k of the batch, or all."""
    vocab = scaled_RV.shape[1]
    width = max(s.top_k or vocab for s in samplings)
    return scaled_RV.topk(min(width, vocab), sorted=True)  # type: ignore[return-value]


def _filter(scaled_RC: Tensor, samplings: list[Sampling]) -> None:
    """Set what top-k, top-p and min-p drop to -inf, in place. The most likely token always stays."""
    width = scaled_RC.shape[1]
    top_k_R1 = torch.tensor([s.top_k or width for s in samplings]).unsqueeze(1)
    scaled_RC.masked_fill_(torch.arange(width) >= top_k_R1, -torch.inf)
    probs_RC = scaled_RC.softmax(-1)
    top_p_R1 = torch.tensor([s.top_p for s in samplings]).unsqueeze(1)
    # A token stays while those before it do not reach top_p. At top_p = 1 rounding must not drop the tail.
    before_RC = probs_RC.cumsum(-1) - probs_RC
    dropped_RC = (before_RC >= top_p_R1) & (top_p_R1 < 1)
    min_p_R1 = torch.tensor([s.min_p for s in samplings]).unsqueeze(1)
    dropped_RC |= probs_RC < min_p_R1 * probs_RC[:, :1]
    dropped_RC[:, 0] = False
    scaled_RC.masked_fill_(dropped_RC, -torch.inf)


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
