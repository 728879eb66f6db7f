"""Check what a request asks for. Errors name the field, its value and the allowed range."""

from __future__ import annotations

import math
from collections.abc import Sequence

from motet_shared.errors import BadRequest
from motet_shared.messages import Sampling

# OpenAI's ranges where its API has the field; else the range that float32 logits support.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "max_tokens": (0, math.inf),
    "min_tokens": (0, math.inf),
}
_LOGIT_BIAS = 100


def check_sampling(sampling: Sampling, vocab: int, max_logprobs: int) -> None:
    """Raise BadRequest for a value that the sampler cannot honour."""
    for field, limits in _RANGES.items():
        _check_range(field, getattr(sampling, field), *limits)
    if sampling.top_p == 0:
        raise BadRequest(
            "top_p=0: give more than 0, or temperature=0 for the most likely token", param="top_p"
        )
    _check_range("logprobs", sampling.logprobs, -1, max_logprobs)
    _check_range("prompt_logprobs", sampling.prompt_logprobs, -1, max_logprobs)
    if sampling.max_tokens == 0 and sampling.prompt_logprobs < 0:
        raise BadRequest(
            "max_tokens=0: give at least 1, or prompt_logprobs to score the prompt alone",
            param="max_tokens",
        )
    for token, bias in sampling.logit_bias.items():
        _check_id("logit_bias", token, vocab)
        _check_range("logit_bias", bias, -_LOGIT_BIAS, _LOGIT_BIAS)
    for token in sampling.stop_token_ids:
        _check_id("stop_token_ids", token, vocab)


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if math.isfinite(value) and low <= value <= high:
        return
    limits = f"at least {low}" if high == math.inf else f"{low} to {high}"
    raise BadRequest(f"{field}={value}: give {limits}", param=field)


def check_tokens(prompt: Sequence[int], output: Sequence[int], vocab: int) -> None:
    """Raise BadRequest for an empty prompt, or for a token outside the vocabulary."""
    if not prompt:
        raise BadRequest("prompt has no tokens; give at least one", param="prompt")
    for field, tokens in (("prompt", prompt), ("output", output)):
        if tokens and (min(tokens) < 0 or max(tokens) >= vocab):
            _check_id(field, next(t for t in tokens if not 0 <= t < vocab), vocab)


def _check_id(field: str, token: int, vocab: int) -> None:
    if not 0 <= token < vocab:
        raise BadRequest(f"{field}: token {token} is not in the vocabulary of {vocab}", param=field)
