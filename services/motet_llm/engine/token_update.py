"""Apply the result of a step to its requests: append tokens, publish and free blocks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from motet_llm.cache.block_tables import BlockTables
from motet_llm.cache.prefix_cache import PrefixCache
from motet_llm.grammar.grammar import GrammarState
from motet_llm.scheduling.scheduler import Scheduler
from motet_llm.scheduling.work import Work
from motet_llm.speculation.verification import AcceptedTokens, accept_tokens
from motet_llm.stages.states import SentStates
from motet_shared.errors import InternalError, MotetError
from motet_shared.messages import PromptScores

from .counts import StepResult
from .model_runner import ModelRunner
from .outputs import StepOutput
from .request import Request
from .sampler import Drawn


class TokenUpdate:
    """Update the requests of one engine after each step."""

    def __init__(
        self,
        runner: ModelRunner,
        tables: BlockTables,
        scheduler: Scheduler,
        prefix_cache: PrefixCache | None,
    ):
        self._runner = runner
        self._tables = tables
        self._scheduler = scheduler
        self._prefix_cache = prefix_cache

    def apply(
        self, works: Sequence[Work], computed: StepResult, failed: Mapping[Request, MotetError]
    ) -> tuple[list[StepOutput], list[AcceptedTokens | None]]:
        """Return the outputs of the requests, and by work the tokens that it accepted.

        Tokens of `failed` requests are discarded. A work whose request fails has None.
        """
        drawn = iter(computed.sampled.by_draft([work.draft for work in works if work.draws]))
        draws = [next(drawn) if work.draws else Drawn([], []) for work in works]
        outputs: list[StepOutput] = []
        accepted: list[AcceptedTokens | None] = []
        for work, draw, num_finite in zip(works, draws, computed.num_finite, strict=True):
            failure = self._failure(work, draw, num_finite, failed)
            accepted.append(None if failure is not None else self._accept(work, draw, num_finite))
            if failure is not None:
                outputs.append(failure)
            elif (one := accepted[-1]) is not None:
                scores = computed.scores.get(work.request)
                states = computed.states.get(work.request)
                news = (scores, states)
                if draw.ids or any(new is not None for new in news) or _is_scored_whole(work):
                    output = _output(work, one, *news)
                    output.codes = computed.codes.get(work.request)
                    outputs.append(output)
        return outputs, accepted

    def _accept(self, work: Work, drawn: Drawn, num_finite: int) -> AcceptedTokens:
        """Append a work's tokens, and bring its blocks up to date."""
        request = work.request
        accepted = accept_tokens(work, drawn, num_finite)
        request.num_computed += work.num_tokens - len(work.draft) + accepted.num_drafted
        if self._prefix_cache is not None and request.blocks.spilled is None:
            self._prefix_cache.publish(request, work.num_tokens)
        self._tables.trim(request)
        if work.draft:
            if num_finite < work.num_tokens:
                self._runner.scrub(self._tables.beyond(request))
            self._scheduler.take_back(request, accepted.num_drafted)
        return accepted

    def _failure(
        self, work: Work, drawn: Drawn, num_finite: int, failed: Mapping[Request, MotetError]
    ) -> StepOutput | None:
        """Return the output that ends a request if not even one token could be drawn."""
        request = work.request
        if request in failed:
            return StepOutput(request.key, [], error=failed[request])
        is_finite = num_finite >= work.num_tokens - len(work.draft)
        if is_finite and (not drawn.ids or drawn.ids[0] is not None):
            return None
        if is_finite and request.grammar_state is not None:
            return _end_of_grammar(request, request.grammar_state)
        self._runner.scrub(self._tables.private_blocks(request))
        place = f"after {request.num_output} output tokens"
        error = InternalError(f"the model computed NaN or infinity {place}; the request ends")
        return StepOutput(request.key, [], error=error)


def _end_of_grammar(request: Request, state: GrammarState) -> StepOutput:
    """End a reply for which no token is allowed: finish if its grammar may end, else fail."""
    if state.may_end:
        return StepOutput(request.key, [], finish="stop")
    error = state.error(f"after {request.num_output} tokens")
    return StepOutput(request.key, [], error=error)


def _is_scored_whole(work: Work) -> bool:
    """Return True if a request without room for output ends, as all of its prompt is computed."""
    request = work.request
    return request.is_full and not request.num_uncomputed and not request.constraints.prefill_only


def _output(
    work: Work, accepted: AcceptedTokens, scores: PromptScores | None, states: SentStates | None
) -> StepOutput:
    request = work.request
    if accepted.ids or _is_scored_whole(work):
        request.times.first_token_at = request.times.first_token_at or time.monotonic()
    has_tokens = bool(accepted.ids or accepted.logprobs or states is not None)
    request.emitted += has_tokens + (scores is not None)
    finish = accepted.finish or ("length" if _is_scored_whole(work) else None)
    return StepOutput(
        request.key, accepted.ids, accepted.logprobs, scores, finish=finish, states=states
    )
