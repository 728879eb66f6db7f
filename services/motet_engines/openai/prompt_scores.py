"""Ask a server for the log-probabilities of a prompt: `prompt_logprobs` of vLLM's completions."""

from __future__ import annotations

from typing import Any

import msgspec

from motet_shared.errors import Unavailable, UnsupportedParameter
from motet_shared.messages import Generate, ScoredToken

from .dialects import ServerDialect


class _Score(msgspec.Struct):
    logprob: float
    rank: int


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Score] | None] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


def scores_body(request: Generate, model: str, dialect: ServerDialect) -> dict[str, Any]:
    """Return a request of one token, whose answer is not streamed: servers stream no such scores."""
    return {
        "model": model,
        "prompt": request.prompt,
        dialect.max_tokens: 1,
        "temperature": 0.0,
        "prompt_logprobs": request.sampling.prompt_logprobs,
    }


def read_scores(answer: Any, request: Generate) -> list[ScoredToken]:
    """Return the scores of all prompt tokens but the first.

    Raises UnsupportedParameter if the answer has none, Unavailable if they are not of the prompt.
    """
    try:
        (choice,) = msgspec.convert(answer, _Answer).choices
        found = choice.prompt_logprobs
        if found is None:
            raise UnsupportedParameter(
                "`prompt_logprobs`: the engine's server returns none; leave it out",
                param="prompt_logprobs",
            )
        pairs = zip(request.prompt[1:], found[1:], strict=True)
        most = request.sampling.prompt_logprobs
        return [_scored(number, ranks or {}, most) for number, ranks in pairs]
    except (msgspec.ValidationError, KeyError, ValueError) as error:
        raise Unavailable(
            f"prompt_logprobs of the engine's server cannot be read: {error!r}"
        ) from None


def _scored(number: int, ranks: dict[str, _Score], most: int) -> ScoredToken:
    own = ranks[str(number)]
    ranked = sorted(ranks.items(), key=lambda entry: -entry[1].logprob)
    top = [(int(one), score.logprob) for one, score in ranked[:most]]
    return ScoredToken(number, own.logprob, own.rank, top)
