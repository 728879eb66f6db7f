"""Run one language model step by step: requests in, tokens out; no threads, no network.

The engine itself only conducts a step. Its parts are built by `components`; optional ones take part
as `Feature`, whose module describes the interface.
"""

from __future__ import annotations

import logging
import math
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar, Unpack

from motet_llm.cache.first_use import TOKENS_AHEAD
from motet_llm.config import EngineConfig
from motet_llm.disaggregation.handovers import Placement
from motet_llm.disaggregation.kv_transfer import fingerprint
from motet_llm.models import batch_invariance as invariance
from motet_llm.parallel.leader import make_runner
from motet_llm.scheduling.work import Work
from motet_llm.speculation import speculator
from motet_llm.speculation.speculator import Speculation
from motet_models.checkpoints.summary import summarize
from motet_shared.errors import BadRequest, DeadlineExceeded, InternalError, MotetError
from motet_shared.messages import TIERS, ModelCard, Sampling, Usage

from . import components
from .admission import Admission
from .counts import StepAccounts, StepResult
from .forward_pass import Batch, ForwardPass
from .model_runner import ModelRunner
from .model_thread import ModelThread
from .outputs import Emit, StepOutput
from .request import Key, Request, RequestOptions
from .step_isolation import StepIsolation
from .thread_owner import ThreadOwner
from .token_update import TokenUpdate

log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")


class Engine:
    """Run continuous batching over one model.

    `add`, `cancel` and `grant` must be called between steps, by the thread that steps. A request
    ends with a `StepOutput` that has `finish` or `error`; its key may then be used again.

    owner: the thread that steps; the first one, until it is released.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner | None = None,
        placement: Placement | None = None,
        speculation: Speculation | None = None,
    ):
        """Load the model unless `runner` is given.

        runner: taken over from another engine for the same model and memory, which must not run
            while this engine does.
        placement: chooses prefill workers for prompts; None: all are computed here.
        speculation: drafts in place of those of `config.speculate`.
        """
        self.config = config
        self.owner = ThreadOwner()
        self._model_thread = ModelThread(overlap=config.overlap, owner=self.owner)
        self._made_runner = runner is None
        self.runner = runner or self.in_model_thread(make_runner, config)
        self.in_model_thread(self.runner.capture_graphs)
        if config.deterministic:
            self.in_model_thread(
                invariance.check, self.runner, speculates=config.speculate != "off"
            )
        speculation = speculation or self.in_model_thread(speculator.build, config, self.runner)
        parts = components.build(
            config, self.runner, self._model_thread, self.owner, placement, speculation
        )
        self.parts = parts
        self.pool, self.scheduler, self.prefix_cache = (
            parts.pool,
            parts.scheduler,
            parts.prefix_cache,
        )
        self.receiver, self.sender, self.speculation = (
            parts.receiver,
            parts.sender,
            parts.speculation,
        )
        self.pace = self.scheduler.pace
        self._features = parts.features
        self._admission = Admission(
            config, self.runner, parts.tables, self.scheduler, self.prefix_cache, parts.spill
        )
        self.context = self._admission.context
        self._forward = ForwardPass(
            self.runner,
            self.speculation,
            parts.compression,
            parts.scoring,
            parts.sending,
            parts.feeding,
            parts.predicting,
        )
        self._isolation = StepIsolation(
            self.runner, parts.tables, self._forward, self._model_thread
        )
        self._token_update = TokenUpdate(
            self.runner, parts.tables, self.scheduler, self.prefix_cache
        )
        self._accounts = StepAccounts(self.pace)
        self._drafting_failed = False
        self._requests: dict[Key, Request] = {}
        self._pending: list[StepOutput] = []
        self._weight_bytes = self.runner.weight_bytes

    def in_model_thread(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call `function` between steps, on the thread that computes them; return its result."""
        return self._model_thread.call(function, *args, **options)

    def close(self) -> None:
        """Release threads and files. The engine must not be used afterwards."""
        if self._made_runner:
            self.runner.close()
        self._model_thread.close()
        if self.parts.offload is not None:
            self.parts.offload.close()

    # ------------------------------------------------------------------------------------------------------ requests
    def add(
        self, key: Key, prompt: list[int], sampling: Sampling, **options: Unpack[RequestOptions]
    ) -> None:
        """Queue a request.

        Raises ContextTooLong, BadRequest, Overloaded when the queue is full, or DeadlineExceeded if
        not even the first token can be ready in time.
        """
        self.owner.check()
        if key in self._requests:
            raise BadRequest(f"request {key!r} is running already")
        request = self._admission.request(key, prompt, sampling, options)
        try:
            for feature in self._features:
                feature.admit(request, options)
            self._admission.check_deadline(request)
            self.scheduler.add(request)
        except MotetError:
            self._forget(request)
            raise
        self._requests[key] = request

    def cancel(self, key: Key) -> None:
        """Drop a request and free what it holds, at once. Ignore the key of a finished one."""
        self.owner.check()
        request = self._requests.pop(key, None)
        if request is not None:
            self.scheduler.finish(request)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        for feature in self._features:
            feature.forget(request)

    def grant(self, key: Key, total: int) -> None:
        """Allow `total` `StepOutput`s with tokens since `add`; a lower total changes nothing."""
        self.owner.check()
        request = self._requests.get(key)
        if request is not None:
            request.credit = max(request.credit, total)

    @property
    def has_work(self) -> bool:
        """Return True if `step` would do something. False while all requests wait for credit."""
        return (
            bool(self._pending)
            or self.scheduler.has_work
            or any(feature.has_news for feature in self._features)
        )

    @property
    def next_deadline(self) -> float:
        """Return the earliest deadline, on the clock of `time.monotonic()`; infinity if none."""
        return min(
            (r.deadline for r in self._requests.values() if r.deadline is not None),
            default=math.inf,
        )

    def take_memory(self) -> bool:
        """Take a page of the KV cache's memory for requests to come, in a millisecond or two.

        Returns True if it did: there may be more to take.
        """
        ahead = self.pool.blocks_for(TOKENS_AHEAD)
        return self.runner.kv.take_page(self.pool.reached + ahead)

    # ------------------------------------------------------------------------------------------------------ one step
    def step(self, emit: Emit | None = None) -> list[StepOutput]:
        """Run one step and return its outputs; empty if there was nothing to compute or to report.

        emit: receives the outputs that are ready while the model computes. The outputs of this step
            then follow with the next step, or are returned if nothing is left to compute.
        """
        self.owner.check()
        self._pending += self._end_early()
        works = self.scheduler.schedule()
        if not works:
            return self._drain()
        if not self._model_thread.overlaps:
            emit = None
        batch = self._forward.prepare(self._with_drafts(works, emit))
        computing = self._model_thread.start(self._forward.compute, batch)
        self._emit_ready(emit)
        self.take_memory()
        try:
            batch.mask.compute()
            computed = computing.result()
        except Exception as error:  # whatever model code raises for the input of one request
            self._isolate(batch, error)
        else:
            self._update(batch, computed)
        return self._drain() if emit is None or not self.scheduler.has_work else []

    def _end_early(self) -> list[StepOutput]:
        """End requests that are late, that came with all their output, or that a feature fails."""
        now = time.monotonic()
        late = [r for r in self._requests.values() if r.deadline is not None and r.deadline <= now]
        outputs = [
            self._fail(r, DeadlineExceeded(f"the deadline passed after {r.num_output} tokens"))
            for r in late
        ]
        full = [(r, end) for r in self.scheduler.waiting if (end := r.end)]
        outputs += [self._end(StepOutput(r.key, [], finish=end)) for r, end in full]
        failed = self._failed(self.scheduler.running)
        return outputs + [self._fail(r, error) for r, error in failed.items()]

    def _failed(self, requests: Sequence[Request]) -> dict[Request, MotetError]:
        failed: dict[Request, MotetError] = {}
        for feature in self._features:
            failed |= feature.failed(requests)
        return failed

    def _with_drafts(self, works: list[Work], emit: Emit | None) -> list[Work]:
        """Return the works of a step, with drafts for those that decode if speculation is on."""
        if self.speculation is None or not (wanted := self.speculation.wanted(works)):
            return works
        draft = partial(self.speculation.draft, wanted)
        if not (self._model_thread.overlaps and self.speculation.drafts.needs_model):
            return self.scheduler.add_drafts(works, self._drafts(self.speculation, wanted, draft))
        drafting = self._model_thread.start(draft)
        self._emit_ready(emit)
        drafts = self._drafts(self.speculation, wanted, drafting.result)
        self._forward.exclude(self.speculation.seconds)
        return self.scheduler.add_drafts(works, drafts)

    def _drafts(
        self,
        speculation: Speculation,
        wanted: Sequence[tuple[Request, int]],
        draft: Callable[[], dict[Request, list[int]]],
    ) -> dict[Request, list[int]]:
        """Return what `draft` returns; nothing if it fails, as a step needs no drafts."""
        began = time.perf_counter()
        try:
            return draft()
        except Exception as error:  # whatever the code of a drafter raises
            if not self._isolation.is_survivable(error):
                raise
            if not self._drafting_failed:  # it may fail in every step
                log.warning("drafting fails; steps are computed without drafts", exc_info=error)
            self._drafting_failed = True
            self._isolation.free_memory(error)
        speculation.seconds = time.perf_counter() - began  # a failure uses up the overhead budget
        for request, _ in wanted:
            speculation.drafts.forget(request)
        return {}

    def _update(self, batch: Batch, computed: StepResult) -> None:
        """Append a step's tokens and end finished requests: all that the next schedule needs."""
        works = batch.works
        self._accounts.record(works, batch.mask, computed)
        failed = self._failed([work.request for work in works])
        self.parts.scoring.take(computed.scores)  # a scored prompt may end with its first token
        self.parts.sending.take(computed.states)
        self.parts.predicting.take(computed.codes)
        outputs, accepted = self._token_update.apply(works, computed, failed)
        if self.speculation is not None:
            self.speculation.count(works, accepted)
        self._pending += map(self._end, outputs)
        for feature in self._features:
            feature.after_step(works)
        if self.speculation is not None:
            counts = [0 if one is None else one.num_drafted for one in accepted]
            self.speculation.record(works, counts, computed.seconds)
        if not self.scheduler.has_work:
            self._forward.mark_idle()

    def _isolate(self, batch: Batch, error: Exception) -> None:
        """Compute a failed step in parts, and end the requests that fail theirs alone."""
        results, failed = self._isolation.retry(batch, error, self._accounts.steps)
        for part, computed in results:
            self._update(part, computed)
        self._pending += [self._fail(request, cause) for request, cause in failed.items()]

    def _drain(self) -> list[StepOutput]:
        """Drain outputs and those of features; safe while the model computes."""
        outputs, self._pending = self._pending, []
        for feature in self._features:
            outputs += map(self._end, feature.outputs())
        return outputs

    def _emit_ready(self, emit: Emit | None) -> None:
        if emit is not None and (ready := self._drain()):
            emit(ready)

    def _end(self, output: StepOutput) -> StepOutput:
        """Remove the request that ends with `output`, if it does, and add usage and timing."""
        if not output.ends:
            return output
        request = self._requests[output.key]
        if output.finish is not None:
            output.usage = self._usage(request)
            output.timing = request.times.stages(time.monotonic())
        self.cancel(output.key)
        return output

    def _fail(self, request: Request, error: MotetError) -> StepOutput:
        return self._end(StepOutput(request.key, [], error=error))

    def _usage(self, request: Request) -> Usage:
        drafts = None if self.speculation is None else self.speculation.verified(request)
        return Usage(
            prompt_tokens=request.num_prompt,
            completion_tokens=request.num_output,
            cached_tokens=request.num_cached or 0,
            accepted_tokens=0 if drafts is None else drafts.accepted,
            rejected_tokens=0 if drafts is None else drafts.rejected,
        )

    # ------------------------------------------------------------------------------------------------------- reports
    def card(self) -> ModelCard:
        """Return the model's card; `kv_format` is set only if prompts may be prefilled remotely.

        That needs a model of which keys and values of all tokens are the whole state of a sequence,
        and do not depend on its length.
        """
        config, runner = self.config, self.runner
        keeps_all = runner.hands_over and not (config.sink_window or config.heavy_hitters)
        return ModelCard(
            name=config.model_name,
            context=self.context,
            created=int((Path(config.model) / "config.json").stat().st_mtime),
            vocab_size=self.runner.vocab,
            block_size=config.block_size if self.prefix_cache is not None else 0,
            kv_format=fingerprint(self.runner, config.deterministic) if keeps_all else "",
            target=config.target,
            rank=config.rank,
            **summarize(Path(config.model)),
        )

    def stats(self) -> dict[str, float]:
        """Return counts since start and the current state.

        Seconds: `step_seconds` of the last step, `model_seconds` of all forward passes,
        `python_seconds` for which the model stood idle between steps although there was work.
        """
        cache, offload = self.prefix_cache, self.parts.offload
        stats = {
            "blocks_total": self.pool.num_blocks,
            "blocks_free": self.pool.num_free,
            "blocks_cached": self.pool.num_idle,
            "evictions": self.pool.evictions,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "out_of_credit": self.scheduler.num_out_of_credit,
            "preemptions": self.scheduler.preemptions,
            "recomputed_tokens": cache.ghosts.recomputed if cache is not None else 0,
            **self._accounts.stats(),
            **self._isolation.stats(),
            "kv_bytes": self.runner.kv.nbytes,
            "weight_bytes": self._weight_bytes,
            "resident_bytes": _resident_bytes(),
            **self.runner.graph_stats(),
            **(offload.stats() if offload is not None else {}),
        }
        for feature in self._features:
            stats |= feature.stats()
        return stats

    def load(self) -> dict[str, float]:
        """Return the load that routers use; callable from any thread.

        Seconds per prefilled token and per decode row, and for each service tier the tokens that
        requests of at least its priority still have to prefill.
        """
        ahead = {
            f"prefill_{name}": float(self.scheduler.tokens_to_prefill(p))
            for name, p in TIERS.items()
        }
        return ahead | {
            "prefill_token": self.pace.prefill_token,
            "decode_row": self.pace.decode_row,
        }

    def check_integrity(self) -> None:
        """Raise InternalError if requests, lists, block tables and pool disagree."""
        listed = [*self.scheduler.running, *self.scheduler.waiting]
        if {id(r) for r in listed} != {id(r) for r in self._requests.values()} or len(
            listed
        ) != len(self._requests):
            raise InternalError("the scheduler's lists and the engine's requests disagree")
        self.scheduler.check_integrity()
        for feature in self._features:
            feature.check_integrity(set(self._requests.values()))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
