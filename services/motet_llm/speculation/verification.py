"""Accept the tokens that a step drew for a request, up to the first one that was misguessed."""

from __future__ import annotations

from dataclasses import dataclass, field

from motet_llm.engine.sampler import Drawn
from motet_llm.scheduling.scheduler import Work
from motet_shared.messages import TokenLogprob


@dataclass(slots=True)
class Kept:
    """New tokens of a request, and its finish reason if it ends with them.

    num_right: how many of them were drafted, so that their keys and values are computed already.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None
    num_right: int = 0


def keep(work: Work, drawn: Drawn, num_finite: int) -> Kept:
    """Append the accepted tokens to the request of `work`, and return them.

    A stop token ends the request and is not appended. num_finite: tokens of the work that the model
    computed without NaN or infinity. Where no token can be drawn at a speculative row, the tokens
    before it stay; the next step begins there and reports the error.
    """
    request, kept = work.request, Kept()
    computed = num_finite - (work.num_tokens - len(work.draft))
    right = min(drawn.agreed, computed)
    for token, logprob in list(zip(drawn.ids, drawn.logprobs, strict=True))[: right + 1]:
        if token is None:
            break
        if token in request.stop_ids:
            kept.finish = "stop"
            break
        request.append(token)
        kept.ids.append(token)
        if logprob is not None:
            kept.logprobs = [*(kept.logprobs or []), logprob]
        if request.grammar_state is not None:
            request.grammar_state.accept([token])
        if end := request.end:
            kept.finish = end
            break
    most = (
        len(kept.ids) if kept.finish else len(kept.ids) - 1
    )  # a request that continues needs one token left to compute
    kept.num_right = max(0, min(right, most))
    return kept
