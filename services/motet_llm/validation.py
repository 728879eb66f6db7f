"""What a request may ask for. Every complaint names the field, its value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from motet_shared.errors import BadRequest
from motet_shared.messages import Sampling

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-math.inf, math.inf),
    "frequency_penalty": (-math.inf, math.inf),
    "repetition_penalty": (0, math.inf),
    "top_k": (0, math.inf),
    "max_tokens": (1, math.inf),
    "min_tokens": (0, math.inf),
}
_NOT_ZERO = ("top_p", "repetition_penalty")


def check_sampling(sampling: Sampling, vocab: int, max_logprobs: int) -> None:
    """Raise BadRequest for a value that no sampler can follow."""
    for field, (low, high) in _RANGES.items():
        value = getattr(sampling, field)
        if not math.isfinite(value) or not low <= value <= high or (field in _NOT_ZERO and value == 0):
            above = "more than" if field in _NOT_ZERO else "at least"
            limits = f"{above} {low}" + (f" and at most {high}" if high < math.inf else "")
            raise BadRequest(f"{field}={value}: give a finite number" + (limits and f" of {limits}"), param=field)
    if not -1 <= sampling.logprobs <= max_logprobs:
        raise BadRequest(f"logprobs={sampling.logprobs}: give -1 (none) to {max_logprobs}", param="logprobs")
    for token, bias in sampling.logit_bias.items():
        _check_id("logit_bias", token, vocab)
        if not math.isfinite(bias):
            raise BadRequest(f"logit_bias[{token}]={bias}: give a finite number", param="logit_bias")
    for token in sampling.stop_token_ids:
        _check_id("stop_token_ids", token, vocab)


def check_tokens(prompt: Sequence[int], output: Sequence[int], vocab: int) -> None:
    """Raise BadRequest for an empty prompt, or for a token that the model does not have."""
    if not prompt:
        raise BadRequest("prompt has no tokens; give at least one", param="prompt")
    for field, tokens in (("prompt", prompt), ("output", output)):
        if tokens and (min(tokens) < 0 or max(tokens) >= vocab):
            _check_id(field, next(t for t in tokens if not 0 <= t < vocab), vocab)


def _check_id(field: str, token: int, vocab: int) -> None:
    if not 0 <= token < vocab:
        raise BadRequest(f"{field}: token {token} is not in the vocabulary of {vocab}", param=field)
