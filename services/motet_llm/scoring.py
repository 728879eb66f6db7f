"""How likely a model finds a text, through the same cache and the same matrices that serve requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from motet_shared.errors import ConfigError
from motet_shared.messages import Sampling

from .model_runner import ModelRunner
from .request import Request
from .scheduler import Work

STEP = 256  # tokens whose logits are computed at a time


@torch.inference_mode()
def log_probabilities(runner: ModelRunner, tokens: Sequence[int]) -> list[float]:
    """The natural logarithm of each token's probability after those before it, from the second token on.

    Raises ConfigError for tokens that are none of the model's, or more of them than its context has.
    """
    if len(tokens) > runner.context:
        raise ConfigError(f"{len(tokens)} tokens are more than the model's context of {runner.context}; shorten them")
    if bad := [token for token in tokens if not 0 <= token < runner.vocab]:
        raise ConfigError(f"token {bad[0]} is none of the model's {runner.vocab}: give the tokenizer of this model")
    found: list[float] = []
    if len(tokens) < 2:
        return found
    with runner.other_caches(1, len(tokens)):
        request = _request(runner, tokens)
        for first in range(0, len(tokens) - 1, STEP):
            due = list(tokens[first + 1 : first + 1 + STEP])
            # A request knows the tokens up to the next one; the others come as a draft, whose logits are all given.
            request.tokens = list(tokens[: first + 1])
            logits_RV = runner.forward([Work(request, len(due), tuple(due[:-1]))]).logits_RV
            logprobs_RV = logits_RV.float().log_softmax(-1)
            found += logprobs_RV.gather(1, torch.tensor(due, device=logits_RV.device).unsqueeze(1)).squeeze(1).tolist()
            request.num_computed = first + len(due)
    return found


def _request(runner: ModelRunner, tokens: Sequence[int]) -> Request:
    """One that has all of the runner's cache."""
    request = Request(0, 0, list(tokens[:1]), Sampling(), max_length=len(tokens))
    needed = -(-len(tokens) // runner.kv.block_size)
    groups = range(len(runner.kv.groups))
    request.tables = [array("i", range(group * needed, (group + 1) * needed)) for group in groups]
    if runner.states is not None:
        request.state_slot = 0
        runner.states.scrub(0)
    return request
