"""Which of the tokens that a step drew for a request stay: those up to the first that its draft had wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from motet_shared.messages import TokenLogprob

from .sampler import Drawn
from .scheduler import Work


@dataclass(slots=True)
class Kept:
    """New tokens of a request, and why it ends with them, if it does.

    num_right: drafted tokens among them, whose keys and values are computed already.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None
    num_right: int = 0


def keep(work: Work, drawn: Drawn, num_finite: int) -> Kept:
    """Append to the request of `work` what stays of its tokens. A stop token ends it and is not among them.

    num_finite: tokens of the work that the model computed without NaN or infinity. Where a row behind a draft cannot be
    drawn from, the tokens before it stay: the next step begins there, and says what is wrong.
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
        if request.sentence is not None:
            request.sentence.accept([token])
        if end := request.end:
            kept.finish = end
            break
    most = len(kept.ids) if kept.finish else len(kept.ids) - 1  # to go on, a token must be left to compute
    kept.num_right = max(0, min(right, most))
    return kept
