"""Define what the engine reports to its callers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from motet_llm.disaggregation.handovers import Handover
from motet_llm.disaggregation.kv_transfer import PackedPart
from motet_llm.stages.states import SentStates
from motet_shared.errors import MotetError
from motet_shared.messages import PromptScores, TokenLogprob, Usage

from .request import Key


@dataclass(slots=True)
class StepOutput:
    """Report the result of one step for one request.

    ids: new tokens; a stop token is never among them.
    logprobs: one per token, and one more of the stop token if the prompt is scored.
    scores: log-probabilities of the prompt's next tokens, which are before `ids`.
    finish: "stop" (a stop token, or the end of the grammar) or "length" (max_tokens or the end of
        the context); None while the request runs or when `error` is set.
    usage: set with `finish`; completion tokens include those emitted before a failover.
    timing: set with `finish`; seconds "queue", "prefill", "decode", and "model": the request's
        share of the forward passes.
    handover: a prefill worker is to compute the prompt, or is to stop doing so.
    packed: keys and values that were computed for another engine.
    states: of the tokens that were computed, for the next stage of a model.
    codes: the further codes of the frame that the token begins, if frames have several.
    """

    key: Key
    ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    scores: PromptScores | None = None
    finish: str | None = None
    error: MotetError | None = None
    usage: Usage | None = None
    timing: dict[str, float] | None = None
    handover: Handover | None = None
    packed: list[PackedPart] | None = None
    states: SentStates | None = None
    codes: list[int] | None = None

    @property
    def ends(self) -> bool:
        """Return True if it is the last output of its request."""
        return self.finish is not None or self.error is not None


Emit = Callable[[list[StepOutput]], object]
