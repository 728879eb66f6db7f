"""Compute the log-probabilities of a text with the KV cache and weights that serve requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import torch

from motet_llm.attention.heavy_hitters import Watch
from motet_llm.attention.prompt_compression import gather, observations, store
from motet_llm.engine.model_runner import ModelRunner
from motet_llm.engine.request import Request
from motet_llm.scheduling.work import Work
from motet_shared.errors import ConfigError
from motet_shared.messages import Sampling

STEP = 256  # tokens whose logits are computed per step


@torch.inference_mode()
def log_probabilities(
    runner: ModelRunner, tokens: Sequence[int], watch: Watch | None = None
) -> list[float]:
    """Return the log-probability (natural) of each token after the first, given those before it.

    watch: heavy hitters by which the prompt, the first tokens, is compressed before the others are
    computed. Raises ConfigError for tokens outside the vocabulary or beyond the context length.
    """
    if len(tokens) > runner.context:
        raise ConfigError(
            f"tokens: {len(tokens)} exceed the context of {runner.context}; shorten the text",
            param="tokens",
        )
    if bad := [token for token in tokens if not 0 <= token < runner.vocab]:
        raise ConfigError(
            f"tokens: {bad[0]} is outside the vocabulary of {runner.vocab}; use the model's tokenizer",
            param="tokens",
        )
    found: list[float] = []
    if len(tokens) < 2:
        return found
    with runner.other_caches(1, len(tokens)):
        request = _request(runner, tokens)
        for first, end in pairwise(_bounds(len(tokens) - 1, watch)):
            due = list(tokens[first + 1 : end + 1])
            # The request ends before the tokens to score; these are its draft, because the
            # forward pass returns the logits of all draft tokens.
            request.tokens = list(tokens[: first + 1])
            works = [Work(request, len(due), tuple(due[:-1]))]
            watched = {} if watch is None or first >= watch.num_prompt else {request: watch}
            logits_RV = runner.forward(works, observations(works, watched)).logits_RV
            logprobs_RV = logits_RV.float().log_softmax(-1)
            found += (
                logprobs_RV.gather(1, torch.tensor(due, device=logits_RV.device).unsqueeze(1))
                .squeeze(1)
                .tolist()
            )
            request.num_computed = end
            if watch is not None and end == watch.num_prompt:
                rows = gather(runner.kv, request, watch)
                request.blocks.num_dropped = watch.num_left_out
                store(runner.kv, request, rows)
    return found


def _bounds(num_tokens: int, watch: Watch | None) -> list[int]:
    """Return the token indices at which forward passes begin and end, ascending."""
    bounds = {*range(0, num_tokens, STEP), num_tokens}
    if watch is not None and watch.num_prompt < num_tokens:
        bounds.add(watch.num_prompt)
    return sorted(bounds)


def _request(runner: ModelRunner, tokens: Sequence[int]) -> Request:
    """Return a request that owns the blocks and the state slot of the runner's cache."""
    request = Request(0, 0, list(tokens[:1]), Sampling(), max_length=len(tokens))
    needed = -(-len(tokens) // runner.kv.block_size)
    groups = range(len(runner.kv.groups))
    request.blocks.tables = [
        array("i", range(group * needed, (group + 1) * needed)) for group in groups
    ]
    if runner.states is not None:
        request.blocks.state_slot = 0
        runner.states.scrub(0)
    return request
