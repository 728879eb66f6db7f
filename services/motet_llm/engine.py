"""The LLM engine: requests in, tokens out, one step at a time. It knows no threads and no network."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from motet_shared.errors import BadRequest, ContextTooLong, DeadlineExceeded, InternalError, MotetError
from motet_shared.messages import ModelCard, Sampling, TokenLogprob, Usage

from . import validation
from .block_pool import BlockPool
from .config import EngineConfig
from .model_runner import ModelRunner
from .request import Key, Request
from .sampler import sample
from .scheduler import Scheduler, Work


@dataclass(slots=True)
class StepOutput:
    """What one step has to say about one request.

    ids: new tokens; a stop token is never among them.
    finish: "stop" (a stop token) or "length" (max_tokens or the end of the context); None: goes on, or `error`.
    usage: with `finish`; completion tokens include those emitted before a move.
    timing: with `finish`; seconds "queue", "prefill", "decode", and "model": the request's share of the forward passes.
    """

    key: Key
    ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None
    error: MotetError | None = None
    usage: Usage | None = None
    timing: dict[str, float] | None = None


class Engine:
    """Continuous batching over one model.

    `add`, `cancel` and `grant` are called between steps, by the thread that steps. After a `StepOutput` with `finish`
    or `error` a request is gone; its key may be used again.
    """

    def __init__(self, config: EngineConfig):
        self.config = config
        self.runner = ModelRunner(config)
        self.pool = BlockPool(self.runner.kv.num_blocks, config.block_size)
        self.scheduler = Scheduler(
            self.pool,
            token_budget=config.token_budget,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
        )
        self.context = min(self.runner.context, self.pool.capacity)
        self._requests: dict[Key, Request] = {}
        self._arrivals = 0
        self._steps = 0
        self._tokens = 0
        self._batch_size = 0
        self._step_seconds = 0.0
        self._model_seconds = 0.0

    def card(self) -> ModelCard:
        created = int((Path(self.config.model) / "config.json").stat().st_mtime)
        return ModelCard(name=self.config.model_name, context=self.context, created=created, vocab=self.runner.vocab)

    def add(
        self,
        key: Key,
        prompt: list[int],
        sampling: Sampling,
        output: Sequence[int] = (),
        credit: int = 1 << 30,
        deadline: float | None = None,
    ) -> None:
        """Queue a request.

        output: tokens emitted before a move. They count for positions, penalties, max_tokens and min_tokens and are
            prefilled with the prompt, but are not emitted again.
        credit: `StepOutput`s with tokens that may be emitted before the first `grant`.
        deadline: on the clock of `time.monotonic()`.

        Raises ContextTooLong, BadRequest, or Overloaded when the queue is full.
        """
        if key in self._requests:
            raise BadRequest(f"request {key!r} is running already")
        validation.check_sampling(sampling, self.runner.vocab, self.config.max_logprobs)
        validation.check_tokens(prompt, output, self.runner.vocab)
        self._check_fits(len(prompt) + len(output))
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.runner.eos_ids)
        max_length = min(len(prompt) + sampling.max_tokens, self.context)
        request = Request(
            key,
            self._arrivals,
            prompt,
            sampling,
            output=output,
            stop_ids=stop_ids,
            credit=credit,
            deadline=deadline,
            max_length=max_length,
        )
        self.scheduler.add(request)
        self._requests[key] = request
        self._arrivals += 1

    def _check_fits(self, num_tokens: int) -> None:
        if num_tokens <= self.context:
            return
        if self.context == self.pool.capacity < self.runner.context:
            limit = f"the KV cache holds {self.context} ({self.pool.num_blocks} blocks of {self.pool.block_size})"
        else:
            limit = f"the context is {self.context}"
        raise ContextTooLong(f"the prompt has {num_tokens} tokens, {limit}; shorten it", param="prompt")

    def cancel(self, key: Key) -> None:
        """Forget a request and free what it holds, at once. An unknown key is one that finished: nothing to do."""
        request = self._requests.pop(key, None)
        if request is not None:
            self.scheduler.finish(request)

    def grant(self, key: Key, total: int) -> None:
        """Allow `total` `StepOutput`s with tokens since `add`. Cumulative; a lower total changes nothing."""
        request = self._requests.get(key)
        if request is not None:
            request.credit = max(request.credit, total)

    @property
    def has_work(self) -> bool:
        """Whether `step` would run the model. False while all requests wait for credit."""
        return self.scheduler.has_work

    @property
    def next_deadline(self) -> float:
        """When the first deadline passes, on the clock of `time.monotonic()`; infinite without any."""
        return min((r.deadline for r in self._requests.values() if r.deadline is not None), default=math.inf)

    def step(self) -> list[StepOutput]:
        """Run what fits into one step; what came of it. Empty if there was nothing to do or to say."""
        started = time.perf_counter()
        ended = self._expire() + self._end_full()
        works = self.scheduler.schedule()
        if not works:
            return ended
        outputs = self._advance(works)
        self._steps += 1
        self._batch_size = len(works)
        self._step_seconds = time.perf_counter() - started
        return ended + outputs

    def _expire(self) -> list[StepOutput]:
        now = time.monotonic()
        late = [r for r in self._requests.values() if r.deadline is not None and r.deadline <= now]
        return [self._fail(r, DeadlineExceeded(f"the deadline passed after {r.num_output} tokens")) for r in late]

    def _end_full(self) -> list[StepOutput]:
        """Requests that arrived with all the output they may have."""
        return [self._finish(r, [], None, "length") for r in self.scheduler.waiting[:] if r.is_full]

    def _advance(self, works: list[Work]) -> list[StepOutput]:
        """Run the model over `works`, draw tokens, and say which requests got one, ended or failed."""
        started = time.perf_counter()
        forward = self.runner.forward(works)
        seconds = time.perf_counter() - started
        self._model_seconds += seconds
        self._account(works, seconds)
        sampled = sample(forward.logits_RV, [work.request for work in works if work.draws])
        drawn = iter(zip(sampled.ids, sampled.logprobs, strict=True))
        outputs = []
        for work, finite in zip(works, forward.finite, strict=True):
            request, draws = work.request, work.draws
            request.num_computed += work.num_tokens
            token, logprob = next(drawn) if draws else (None, None)
            if not finite or (draws and token is None):
                outputs.append(self._fail_not_finite(request))
            elif token is not None:
                outputs.append(self._append(request, token, logprob))
        return outputs

    def _account(self, works: list[Work], seconds: float) -> None:
        now = time.monotonic()
        total = sum(work.num_tokens for work in works)
        self._tokens += total
        for work in works:
            work.request.model_seconds += seconds * work.num_tokens / total
            work.request.started_at = work.request.started_at or now - seconds

    def _append(self, request: Request, token: int, logprob: TokenLogprob | None) -> StepOutput:
        request.first_token_at = request.first_token_at or time.monotonic()
        if token in request.stop_ids:
            return self._finish(request, [], None, "stop")
        request.tokens.append(token)
        request.emitted += 1
        logprobs = None if logprob is None else [logprob]
        if request.is_full:
            return self._finish(request, [token], logprobs, "length")
        return StepOutput(request.key, [token], logprobs)

    def _finish(self, request: Request, ids: list[int], logprobs: list[TokenLogprob] | None, reason: str) -> StepOutput:
        self.cancel(request.key)
        usage = Usage(prompt_tokens=request.num_prompt, completion_tokens=request.num_output)
        timing = request.timing(time.monotonic())
        return StepOutput(request.key, ids, logprobs, finish=reason, usage=usage, timing=timing)

    def _fail(self, request: Request, error: MotetError) -> StepOutput:
        self.cancel(request.key)
        return StepOutput(request.key, [], error=error)

    def _fail_not_finite(self, request: Request) -> StepOutput:
        self.runner.scrub(request.block_table)
        place = f"after {request.num_output} output tokens"
        return self._fail(request, InternalError(f"the model computed NaN or infinity {place}; the request ends"))

    def stats(self) -> dict[str, float]:
        """Counts since start and the state of now. `step_seconds` is the last step's, `model_seconds` all steps'."""
        return {
            "blocks_total": self.pool.num_blocks,
            "blocks_free": self.pool.num_free,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "paused": self.scheduler.num_paused,
            "preemptions": self.scheduler.preemptions,
            "steps": self._steps,
            "tokens": self._tokens,
            "batch_size": self._batch_size,
            "step_seconds": self._step_seconds,
            "model_seconds": self._model_seconds,
            "kv_bytes": self.runner.kv.nbytes,
            "rss": _resident_bytes(),
        }

    def check_integrity(self) -> None:
        """Raise InternalError if requests, lists, block tables and pool disagree."""
        listed = [*self.scheduler.running, *self.scheduler.waiting]
        if {id(r) for r in listed} != {id(r) for r in self._requests.values()} or len(listed) != len(self._requests):
            raise InternalError("the scheduler's lists and the engine's requests disagree")
        self.scheduler.check_integrity()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
