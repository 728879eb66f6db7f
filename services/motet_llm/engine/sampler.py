"""Draw the next token of each row of logits according to its request's sampling options.

Order: logit bias and min_tokens, repetition, presence and frequency penalties, grammar masks, then
`motet_kernels.sampling.sampling`: temperature, top-k, top-p, min-p, draw. Noise is keyed by (seed, output
position, token). Temperature 0 takes the most likely token after bias, penalties and masks.

Log-probabilities are those of the model's own distribution, before all of the above, as in OpenAI's
API: sampling options do not change them.

On a GPU, the only synchronization is the reading of the tokens at the end.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from motet_kernels.sampling import sampling, speculation
from motet_kernels.sampling.choice import Choice, Edits
from motet_llm.grammar.token_mask import TokenMask
from motet_llm.speculation.speculative_row import Row
from motet_shared.messages import TokenLogprob


@dataclass(slots=True)
class Drawn:
    """Hold the tokens drawn by the rows of one work.

    agreed: how many draft tokens equal those drawn.
    """

    ids: list[int | None]
    logprobs: list[TokenLogprob | None]
    agreed: int = 0


@dataclass(slots=True)
class Sampled:
    """Hold the result of sampling, one entry per row.

    ids: None where no token can be drawn: NaN, infinities, or no token is allowed.
    agreed: for each draft, how many of its tokens were drawn.
    """

    ids: list[int | None]
    logprobs: list[TokenLogprob | None]
    agreed: list[int] = field(default_factory=list)

    def by_draft(self, drafts: Sequence[Sequence[int]]) -> list[Drawn]:
        """Return the drawn tokens by draft: a row before each of its tokens, one after the last."""
        found, start = [], 0
        for draft, agreed in zip(drafts, self.agreed, strict=True):
            end = start + 1 + len(draft)
            found.append(Drawn(self.ids[start:end], self.logprobs[start:end], agreed))
            start = end
        return found


def sample(
    logits_RV: Tensor,
    requests: Sequence[Row],
    mask: TokenMask | None = None,
    drafts: Sequence[Sequence[int]] = (),
) -> Sampled:
    """Draw one token per row. `requests[r]` gives the options and the tokens before row r.

    `logits_RV` is not modified.

    mask: allowed tokens of the rows that follow a grammar.
    drafts: the guessed tokens, if any; a draft of n tokens has n + 1 rows.
    """
    ids_R = choose(logits_RV, requests, mask)
    agreed = speculation.agreement(ids_R, drafts).tolist() if any(drafts) else [0] * len(drafts)
    logprobs = _logprobs(logits_RV, requests, ids_R)
    return Sampled([None if token < 0 else token for token in ids_R.tolist()], logprobs, agreed)


def choose(logits_RV: Tensor, requests: Sequence[Row], mask: TokenMask | None = None) -> Tensor:
    """Return the tokens of `sample`, `[R]`, int64, -1 where none can be drawn."""
    edits = edits_of(requests)
    edited_RV = logits_RV if edits is None else sampling.edit(logits_RV, edits)
    bits = None if mask is None else mask.bits()
    return sampling.draw(edited_RV, [_choice(request) for request in requests], bits)


def _choice(request: Row) -> Choice:
    s = request.sampling
    return Choice(s.temperature, s.top_k, s.top_p, s.min_p, s.seed, request.num_output)


# ------------------------------------------------------------------------------------------------ bias and penalties
def edits_of(requests: Sequence[Row]) -> Edits | None:
    """Return bias, min_tokens and penalties of all rows; None if no row has any."""
    rows = [(row, _row_edits(request)) for row, request in enumerate(requests) if _edits(request)]
    if not rows:
        return None
    numbers = [np.full(len(columns[0]), row, np.int32) for row, columns in rows]
    return Edits(
        np.concatenate(numbers),
        *map(np.concatenate, zip(*(columns for _, columns in rows), strict=True)),
    )


def _edits(request: Row) -> bool:
    s = request.sampling
    return bool(
        s.logit_bias
        or s.presence_penalty
        or s.frequency_penalty
        or s.repetition_penalty != 1.0
        or (s.min_tokens and request.num_output < s.min_tokens)
    )


def _row_edits(request: Row) -> tuple[np.ndarray, ...]:
    """Return the columns of one row: tokens, bias, factor, less."""
    s = request.sampling
    biased = np.fromiter(s.logit_bias, np.int64, len(s.logit_bias))
    banned = np.array([*request.stop_ids] if request.num_output < s.min_tokens else [], np.int64)
    seen = request.distinct if s.repetition_penalty != 1.0 else np.empty(0, np.int64)
    output_tokens = np.array(
        request.output if s.presence_penalty or s.frequency_penalty else [], np.int64
    )
    output_tokens, counts = np.unique(output_tokens, return_counts=True)
    tokens = np.unique(np.concatenate([biased, banned, seen, output_tokens]))
    bias, penalty = np.zeros((2, len(tokens)), np.float32)
    factor = np.ones(len(tokens), np.float32)
    bias[np.searchsorted(tokens, biased)] = [*s.logit_bias.values()]
    bias[np.searchsorted(tokens, banned)] = -np.inf
    factor[np.searchsorted(tokens, seen)] = s.repetition_penalty
    presence, frequency = np.array([s.presence_penalty, s.frequency_penalty], np.float32)
    penalty[np.searchsorted(tokens, output_tokens)] = presence + frequency * counts.astype(
        np.float32
    )
    return tokens.astype(np.int32), bias, factor, penalty


# -------------------------------------------------------------------------------------------------- log-probabilities
def _logprobs(
    logits_RV: Tensor, requests: Sequence[Row], ids_R: Tensor
) -> list[TokenLogprob | None]:
    """Return the log-probabilities of the rows that ask for them.

    Rows that ask for the same number of alternatives are computed together: which of several
    equally likely tokens are listed must not depend on the other rows.
    """
    result: list[TokenLogprob | None] = [None] * len(requests)
    rows_by_most: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        if request.sampling.logprobs >= 0:
            rows_by_most.setdefault(request.sampling.logprobs, []).append(row)
    found = {
        most: sampling.logprobs(logits_RV, rows, ids_R, most) for most, rows in rows_by_most.items()
    }
    tokens = ids_R.tolist() if found else []
    for most, rows in rows_by_most.items():
        for row, chosen, values, ids in zip(
            rows, *(column.tolist() for column in found[most]), strict=True
        ):
            if tokens[row] >= 0:
                result[row] = TokenLogprob(tokens[row], chosen, list(zip(ids, values, strict=True)))
    return result
