"""Compute what is left of a reply that another instance began."""

from __future__ import annotations

from motet_shared.messages import Generate


def remaining(request: Generate) -> int:
    """Return how many tokens the reply may still have."""
    return request.sampling.max_tokens - len(request.output)


def scores_prompt(request: Generate) -> bool:
    """Return True if the prompt's tokens are to be scored; a reply that goes on has had its scores."""
    wanted = request.sampling.prompt_logprobs >= 0 and len(request.prompt) > 1
    return wanted and not request.output


def seed_of(request: Generate) -> int:
    """Return the seed of the rest of a reply.

    An engine draws from its beginning: the same seed again would repeat the noise of the first part.
    """
    return (request.sampling.seed + len(request.output)) & (2**63 - 1)
