"""Accept the tokens that a step drew for a request, up to the first wrong draft token."""

from __future__ import annotations

from dataclasses import dataclass, field

from motet_llm.engine.sampler import Drawn
from motet_llm.scheduling.work import Work
from motet_shared.messages import TokenLogprob


@dataclass(slots=True)
class AcceptedTokens:
    """Hold the new tokens of a request, and its finish reason if it ends with them.

    num_drafted: how many of them were drafted, so that their keys and values are computed already.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None
    num_drafted: int = 0


def accept_tokens(work: Work, drawn: Drawn, num_finite: int) -> AcceptedTokens:
    """Append the accepted tokens to the request of `work`, and return them.

    A stop token ends the request and is not appended; of a request whose prompt is scored, its
    log-probability is the last one. num_finite: tokens of the work that the model
    computed without NaN or infinity. Where no token can be drawn at a speculative row, the tokens
    before it stay; the next step begins there and reports the error.
    """
    request, accepted = work.request, AcceptedTokens()
    computed = num_finite - (work.num_tokens - len(work.draft))
    num_agreed = min(drawn.agreed, computed)
    for token, logprob in list(zip(drawn.ids, drawn.logprobs, strict=True))[: num_agreed + 1]:
        if token is None:
            break
        if token in request.stop_ids:
            accepted.finish = "stop"
            if logprob is not None and request.sampling.prompt_logprobs >= 0:
                accepted.logprobs = [*(accepted.logprobs or []), logprob]
            break
        request.append(token)
        accepted.ids.append(token)
        if logprob is not None:
            accepted.logprobs = [*(accepted.logprobs or []), logprob]
        if request.grammar_state is not None:
            request.grammar_state.accept([token])
        if end := request.end:
            accepted.finish = end
            break
    max_computed = (
        len(accepted.ids) if accepted.finish else len(accepted.ids) - 1
    )  # a request that continues needs one token left to compute
    accepted.num_drafted = max(0, min(num_agreed, max_computed))
    return accepted
