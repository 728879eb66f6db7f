"""Run one language model step by step: requests in, tokens out; no threads, no network."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import ParamSpec, TypeVar, Unpack

from motet_llm.attention.prompt_compression import PromptCutter
from motet_llm.cache.block_pool import BlockPool
from motet_llm.cache.block_tables import BlockTables
from motet_llm.cache.offload import Offload
from motet_llm.cache.prefix_cache import PrefixCache
from motet_llm.cache.spill import Spill
from motet_llm.config import EngineConfig
from motet_llm.disaggregation.kv_receiver import Handover, KvReceiver
from motet_llm.disaggregation.kv_sender import KvSender, Packed
from motet_llm.disaggregation.kv_transfer import fingerprint
from motet_llm.grammar.grammar import GrammarState
from motet_llm.grammar.token_mask import TokenMask
from motet_llm.models import batch_invariance as invariance
from motet_llm.models.image_embeddings import ImageEmbedding, place
from motet_llm.scheduling.scheduler import Limits, Scheduler, Work
from motet_llm.scheduling.step_time import StepTimeEstimate
from motet_llm.speculation import speculator as speculation
from motet_llm.speculation.speculative_row import Row
from motet_llm.speculation.verification import AcceptedTokens, accept_tokens
from motet_shared.errors import (
    BadRequest,
    ContextTooLong,
    DeadlineExceeded,
    InternalError,
    MotetError,
)
from motet_shared.messages import TIERS, ModelCard, Sampling, TokenLogprob, Usage

from . import validation
from .model_runner import ModelRunner
from .request import Key, Options, Request
from .sampler import Drawn, Sampled, sample

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(slots=True)
class StepOutput:
    """Result of one step for one request.

    ids: new tokens; a stop token is never among them.
    finish: "stop" (a stop token, or the end of the grammar) or "length" (max_tokens or the end of
        the context); None while the request goes on or when `error` is set.
    usage: set with `finish`; completion tokens include those emitted before a move.
    timing: set with `finish`; seconds "queue", "prefill", "decode", and "model": the request's
        share of the forward passes.
    handover: a prefill worker is to compute the prompt, or is to stop doing so.
    packed: keys and values that were computed for another engine.
    """

    key: Key
    ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None
    error: MotetError | None = None
    usage: Usage | None = None
    timing: dict[str, float] | None = None
    handover: Handover | None = None
    packed: list[Packed] | None = None


Emit = Callable[[list[StepOutput]], object]


@dataclass(slots=True, frozen=True)
class Computed:
    """Result of one step's computation, with the times it took.

    num_finite: for each work, how many of its first tokens are free of NaN and infinity.
    waited: seconds that the model stood idle before the step although there was work.
    model_seconds: seconds of the forward pass.
    seconds: seconds of the forward pass and sampling together.
    """

    num_finite: list[int]
    sampled: Sampled
    waited: float
    model_seconds: float
    seconds: float


@dataclass(slots=True)
class StepCounts:
    """Sums over all steps, and the size and duration of the last one."""

    steps: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    batch_size: int = 0
    step_seconds: float = 0.0
    model_seconds: float = 0.0
    python_seconds: float = 0.0
    masked_steps: int = 0
    mask_seconds: float = 0.0
    # Steps with decode rows: those that only decode, and those that also prefill.
    decode_steps: int = 0
    decode_seconds: float = 0.0
    mixed_steps: int = 0
    mixed_seconds: float = 0.0
    mixed_tokens: int = 0  # prefilled by the mixed steps

    def note(self, batch_size: int, num_tokens: int, computed: Computed) -> None:
        """Add a step of `batch_size` works that computed `num_tokens` tokens."""
        self.steps += 1
        self.tokens += num_tokens
        self.batch_size = batch_size
        self.step_seconds = computed.waited + computed.seconds
        self.model_seconds += computed.model_seconds
        self.python_seconds += computed.waited

    def note_mix(self, seconds: float, num_decodes: int, num_prefill_tokens: int) -> None:
        """Add a step's time to the steps that only decode, or to the mixed ones."""
        if num_decodes and num_prefill_tokens:
            self.mixed_steps += 1
            self.mixed_seconds += seconds
            self.mixed_tokens += num_prefill_tokens
        elif num_decodes:
            self.decode_steps += 1
            self.decode_seconds += seconds

    def note_mask(self, mask: TokenMask) -> None:
        self.masked_steps += not mask.empty
        self.mask_seconds += mask.seconds


class Engine:
    """Run continuous batching over one model.

    `add`, `cancel` and `grant` must be called between steps, by the thread that steps. A request
    ends with a `StepOutput` that has `finish` or `error`; its key may then be used again.
    """

    def __init__(self, config: EngineConfig, runner: ModelRunner | None = None):
        """Load the model unless `runner` is given.

        runner: taken over from another engine for the same model and memory, which must not run
            while this engine does.
        """
        self.config = config
        self._model_thread = ThreadPoolExecutor(1, "motet-model") if config.overlap else None
        self.runner = runner or self.in_model_thread(ModelRunner, config)
        if config.deterministic:
            self.in_model_thread(
                invariance.check, self.runner, speculates=config.speculate != "off"
            )
        self.speculation = self.in_model_thread(speculation.build, config, self.runner)
        self.pool = BlockPool(self.runner.kv.num_blocks, config.block_size)
        self.pace = StepTimeEstimate()
        self._offload = self._make_offload(config)
        self._spill = self._make_spill(config, self._offload)
        self._tables = BlockTables(
            self.pool,
            self.runner.kv.layout,
            step_tokens=config.token_budget,
            states=self.runner.states,
            max_open=config.max_running if self.runner.states else 1 << 30,
            keep_all=config.contiguous_kv,
            spill=self._spill,
        )
        self.prefix_cache = self._make_prefix_cache(config)
        self.scheduler = Scheduler(self._tables, _limits(config), self.prefix_cache, self.pace)
        self._cutter = PromptCutter(self.runner.kv, self._tables, self.scheduler)
        self.receiver = KvReceiver(self.runner.kv, self._tables, self.scheduler, self.prefix_cache)
        self.sender = KvSender(self.runner.kv)
        self.context = min(self.runner.context, self._tables.longest)
        self._idle_since: float | None = None  # when the last step ended, if work was left
        self._requests: dict[Key, Request] = {}
        self._pending: list[StepOutput] = []
        self._arrivals = 0
        self._counts = StepCounts()
        self._weight_bytes = self.runner.weight_bytes

    def in_model_thread(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call `function` between steps, on the thread that computes them; return its result.

        OpenMP keeps a thread pool for each thread that computes. Once those pools have more threads
        than there are cores, none of them spins from one kernel to the next: that costs a third of
        a small step's time.
        """
        if self._model_thread is None:
            return function(*args, **options)
        return self._model_thread.submit(function, *args, **options).result()

    def _make_offload(self, config: EngineConfig) -> Offload | None:
        if not (config.host_cache or config.disk_cache):
            return None
        folder = Path(config.cache_folder) if config.cache_folder else None
        return Offload(
            config.host_cache,
            config.disk_cache,
            folder,
            lambda: self.pace.prefill_token * config.block_size,
        )

    def _make_spill(self, config: EngineConfig, offload: Offload | None) -> Spill | None:
        return (
            Spill(self.runner.kv, offload) if config.long_context and offload is not None else None
        )

    def _make_prefix_cache(self, config: EngineConfig) -> PrefixCache | None:
        if not config.prefix_cache:
            return None
        return PrefixCache(self.pool, self.runner.kv, self._offload, self.runner.states)

    def close(self) -> None:
        """Release threads and files. The engine must not be used afterwards."""
        if self._model_thread is not None:
            self._model_thread.shutdown()
        if self._offload is not None:
            self._offload.close()

    def card(self) -> ModelCard:
        """Return the model's card; `kv` is set only if prompts may be prefilled remotely."""
        created = int((Path(self.config.model) / "config.json").stat().st_mtime)
        return ModelCard(
            name=self.config.model_name,
            context=self.context,
            created=created,
            vocab_size=self.runner.vocab,
            block_size=self.config.block_size if self.prefix_cache is not None else 0,
            kv_format=fingerprint(self.runner, self.config.deterministic)
            if self._keeps_everything
            else "",
        )

    @property
    def _keeps_everything(self) -> bool:
        """Return True if the keys and values of all tokens are the whole state of a sequence.

        Only then can a prompt's state be transferred from another engine.
        """
        return not (self.runner.states or self.config.recent or self.config.heavy_hitters)

    def add(
        self,
        key: Key,
        prompt: list[int],
        sampling: Sampling,
        *,
        images: Sequence[ImageEmbedding] = (),
        **options: Unpack[Options],
    ) -> None:
        """Queue a request. `images`: those in its prompt, in the order of placeholders.

        Raises ContextTooLong, BadRequest, Overloaded when the queue is full, or DeadlineExceeded if
        not even the first token can be ready in time.
        """
        if key in self._requests:
            raise BadRequest(f"request {key!r} is running already")
        output = options.get("output", ())
        validation.check_sampling(sampling, self.runner.vocab, self.config.max_logprobs)
        validation.check_tokens(prompt, output, self.runner.vocab)
        self._check_fits(len(prompt) + len(output), whole="send_from" in options)
        stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else self.runner.eos_ids
        )
        max_length = min(len(prompt) + sampling.max_tokens, self.context)
        request = Request(
            key,
            self._arrivals,
            prompt,
            sampling,
            max_length=max_length,
            stop_ids=stop_ids,
            images=place(prompt, images, self.runner.image_shape),
            watch=rule.watch(len(prompt))
            if (rule := self.config.heavy_hitters) is not None
            else None,
            **options,
        )
        self._check_deadline(request)
        self.scheduler.add(request)
        self._requests[key] = request
        self._arrivals += 1

    def _check_fits(self, num_tokens: int, *, whole: bool) -> None:
        """Raise ContextTooLong if `num_tokens` exceed the context.

        whole: all tokens must be in the pool, because they are transferred to another engine from
            there.
        """
        context = min(self.context, self._tables.longest_in_pool) if whole else self.context
        if num_tokens <= context:
            return
        if context < self.runner.context:
            more = (
                "" if self._spill is None or whole else f" and {self._spill.capacity} in its tiers"
            )
            limit = f"the KV cache holds {context} ({self.pool.num_blocks} blocks of {self.pool.block_size}{more})"
        else:
            limit = f"the context is {context}"
        raise ContextTooLong(
            f"the prompt has {num_tokens} tokens, {limit}; shorten it", param="prompt"
        )

    def _check_deadline(self, request: Request) -> None:
        """Raise DeadlineExceeded if the deadline cannot be met even at the best pace measured."""
        if request.deadline is None:
            return
        num_prefill = self.scheduler.tokens_before(request)
        if self.prefix_cache is not None:
            num_prefill -= (
                len(self.prefix_cache.match(request.findable, request.root).nodes)
                * self.pool.block_size
            )
        per_step = 1 if self.speculation is None else 1 + self.config.draft_tokens
        least = self.pace.at_least(num_prefill, -(-request.sampling.min_tokens // per_step))
        left = request.deadline - time.monotonic()
        if left < least:
            raise DeadlineExceeded(
                f"{max(left, 0):.3g} s are left, and the first token takes at least {least:.3g} s"
            )

    def cancel(self, key: Key) -> None:
        """Drop a request and free what it holds, at once. Ignore the key of a finished one."""
        request = self._requests.pop(key, None)
        if request is not None:
            self.scheduler.finish(request)
            if self.speculation is not None:
                self.speculation.forget(request)

    def grant(self, key: Key, total: int) -> None:
        """Allow `total` `StepOutput`s with tokens since `add`; a lower total changes nothing."""
        request = self._requests.get(key)
        if request is not None:
            request.credit = max(request.credit, total)

    @property
    def has_work(self) -> bool:
        """Return True if `step` would do something. False while all requests wait for credit."""
        return bool(self._pending) or self.receiver.has_pending or self.scheduler.has_work

    @property
    def next_deadline(self) -> float:
        """Return the earliest deadline, on the clock of `time.monotonic()`; infinity if none."""
        return min(
            (r.deadline for r in self._requests.values() if r.deadline is not None),
            default=math.inf,
        )

    def step(self, emit: Emit | None = None) -> list[StepOutput]:
        """Run one step and return its outputs; empty if there was nothing to compute or to report.

        emit: receives the outputs that are ready while the model computes. The outputs of this step
            then follow with the next step, or are returned if nothing is left to compute.
        """
        ended = self._expire() + self._end_full() + self._end_lost()
        self._pending = ended + self._pending
        works = self.scheduler.schedule()
        if not works:
            return self._handed_over()
        works = self._with_drafts(works, emit)
        rows = [row for work in works for row in work.rows]
        mask = TokenMask(rows, self.runner.vocab, self.runner.device)
        if emit is None or self._model_thread is None:
            mask.compute()
            self._take(works, self.in_model_thread(self._compute, works, rows, mask))
            return self._handed_over()
        computing = self._model_thread.submit(self._compute, works, rows, mask)
        self._say(emit)
        mask.compute()
        self._take(works, computing.result())
        return [] if self.scheduler.has_work else self._handed_over()

    def _say(self, emit: Emit) -> None:
        if ready := self._handed_over():
            emit(ready)

    def _with_drafts(self, works: list[Work], emit: Emit | None) -> list[Work]:
        """Return the works of a step, with drafts for those that decode if speculation is on."""
        if self.speculation is None or not (wanted := self.speculation.wanted(works)):
            return works
        if self._model_thread is None or not self.speculation.drafts.needs_model:
            return self.scheduler.widen(works, self.speculation.draft(wanted))
        drafting = self._model_thread.submit(self.speculation.draft, wanted)
        if emit is not None:
            self._say(emit)
        drafts = drafting.result()
        if self._idle_since is not None:
            self._idle_since += self.speculation.seconds  # spent on drafting: not idle time
        return self.scheduler.widen(works, drafts)

    def _handed_over(self) -> list[StepOutput]:
        """Drain outputs and KV transfers; safe while the model computes."""
        outputs, self._pending = self._pending, []
        outputs += [StepOutput(news.key, [], handover=news) for news in self.receiver.settle()]
        return outputs + [
            self._pass_on(*packed) for packed in self.sender.pack(self.scheduler.running)
        ]

    def _pass_on(self, request: Request, packed: list[Packed]) -> StepOutput:
        """Return the output that carries transferred parts; the last one ends the request here."""
        request.emitted += 1
        if request.num_uncomputed:
            return StepOutput(request.key, [], packed=packed)
        return replace(self._finish(request, [], None, "stop"), packed=packed)

    def _expire(self) -> list[StepOutput]:
        now = time.monotonic()
        late = [r for r in self._requests.values() if r.deadline is not None and r.deadline <= now]
        return [
            self._fail(r, DeadlineExceeded(f"the deadline passed after {r.num_output} tokens"))
            for r in late
        ]

    def _end_full(self) -> list[StepOutput]:
        """End requests that arrived with all the output they may have."""
        return [self._finish(r, [], None, end) for r in self.scheduler.waiting[:] if (end := r.end)]

    def _end_lost(self) -> list[StepOutput]:
        """Fail requests whose first keys and values could not be spilled or read back."""
        return [
            self._fail_lost(r, r.spilled.failure)
            for r in self.scheduler.running[:]
            if r.spilled and r.spilled.failure
        ]

    def _compute(self, works: list[Work], rows: list[Row], mask: TokenMask) -> Computed:
        """Run the forward pass and sample. `rows`: the rows of all works that draw a token."""
        started = time.perf_counter()
        waited = 0.0 if self._idle_since is None else started - self._idle_since
        forward = self.runner.forward(works)
        model_seconds = time.perf_counter() - started
        sampled = sample(
            forward.logits_RV, rows, mask, [work.draft for work in works if work.draws]
        )
        self._counts.note_mask(mask)
        if self.speculation is not None:
            self.speculation.drafts.observe(works, forward, sampled)
        num_finite = forward.num_finite
        self._idle_since = time.perf_counter()
        seconds = self._idle_since - started
        if self.runner.on_gpu:  # reading the tokens is what waits for the GPU
            model_seconds = seconds
        return Computed(num_finite, sampled, waited, model_seconds, seconds)

    def _take(self, works: list[Work], computed: Computed) -> None:
        """Append a step's tokens and end finished requests: all that the next schedule needs."""
        self._account(works, computed)
        drawn = iter(computed.sampled.by_draft([work.draft for work in works if work.draws]))
        draws = [next(drawn) if work.draws else Drawn([], []) for work in works]
        right = list(map(self._take_one, works, draws, computed.num_finite))
        if due := [
            work.request
            for work in works
            if work.request.watching is not None and not work.request.num_due
        ]:
            self.in_model_thread(self._cutter.cut, due)
        if self.speculation is not None:
            self.speculation.record(works, right, computed.seconds)
        if not self.scheduler.has_work:
            self._idle_since = None

    def _account(self, works: list[Work], computed: Computed) -> None:
        now = time.monotonic()
        num_decodes = sum(work.request.num_uncomputed == 1 for work in works)
        total = sum(work.num_tokens for work in works)
        num_prefill = total - num_decodes - sum(len(work.draft) for work in works)
        self.pace.note(computed.seconds, num_decodes, num_prefill)
        self._counts.note_mix(computed.seconds, num_decodes, num_prefill)
        self._counts.note(len(works), total, computed)
        for work in works:
            if work.request.started_at is None:
                self._counts.cached_tokens += work.request.num_cached or 0
                work.request.started_at = now - computed.seconds - work.request.transfer_seconds
            work.request.model_seconds += computed.model_seconds * work.num_tokens / total

    def _take_one(self, work: Work, drawn: Drawn, num_finite: int) -> int:
        """Apply the result of one work and return how many tokens of its draft were accepted."""
        request = work.request
        if (failure := self._failure(work, drawn, num_finite)) is not None:
            self._pending.append(failure)
            return 0
        accepted = accept_tokens(work, drawn, num_finite)
        request.num_computed += work.num_tokens - len(work.draft) + accepted.num_drafted
        if self.prefix_cache is not None and request.spilled is None:
            self.prefix_cache.publish(request, keep_state=work.num_tokens > 1)
        self._tables.trim(request)
        if work.draft:
            self._take_back(work, accepted, num_finite)
        if drawn.ids:
            self._pending.append(self._tell(request, accepted))
        return accepted.num_drafted

    def _failure(self, work: Work, drawn: Drawn, num_finite: int) -> StepOutput | None:
        """Return the output that ends a request if not even one token could be drawn."""
        request = work.request
        if request.spilled is not None and request.spilled.failure is not None:
            return self._fail_lost(request, request.spilled.failure)
        is_finite = num_finite >= work.num_tokens - len(work.draft)
        if is_finite and (not drawn.ids or drawn.ids[0] is not None):
            return None
        if is_finite and request.grammar_state is not None:
            return self._end_of_grammar(request, request.grammar_state)
        return self._fail_not_finite(request)

    def _take_back(self, work: Work, accepted: AcceptedTokens, num_finite: int) -> None:
        """Free rejected draft tokens and charge the tenant for the accepted ones only."""
        if num_finite < work.num_tokens:
            self.runner.scrub(self._tables.beyond(work.request))
        self.scheduler.take_back(work.request)
        self.scheduler.counts.serve(work.request.tenant, accepted.num_drafted)
        work.request.accepted += accepted.num_drafted
        work.request.rejected += len(work.draft) - accepted.num_drafted

    def _tell(self, request: Request, accepted: AcceptedTokens) -> StepOutput:
        request.first_token_at = request.first_token_at or time.monotonic()
        request.emitted += bool(accepted.ids)
        if accepted.finish is not None:
            return self._finish(request, accepted.ids, accepted.logprobs, accepted.finish)
        return StepOutput(request.key, accepted.ids, accepted.logprobs)

    def _end_of_grammar(self, request: Request, grammar_state: GrammarState) -> StepOutput:
        """End a reply for which no token is allowed: finish if its grammar may end, else fail."""
        if grammar_state.may_end:
            return self._finish(request, [], None, "stop")
        return self._fail(request, grammar_state.error(f"after {request.num_output} tokens"))

    def _finish(
        self, request: Request, ids: list[int], logprobs: list[TokenLogprob] | None, reason: str
    ) -> StepOutput:
        self.cancel(request.key)
        usage = Usage(
            prompt_tokens=request.num_prompt,
            completion_tokens=request.num_output,
            cached_tokens=request.num_cached or 0,
            accepted_tokens=request.accepted,
            rejected_tokens=request.rejected,
        )
        timing = request.timing(time.monotonic())
        return StepOutput(request.key, ids, logprobs, finish=reason, usage=usage, timing=timing)

    def _fail(self, request: Request, error: MotetError) -> StepOutput:
        self.cancel(request.key)
        return StepOutput(request.key, [], error=error)

    def _fail_not_finite(self, request: Request) -> StepOutput:
        self.runner.scrub(self._tables.private_blocks(request))
        place = f"after {request.num_output} output tokens"
        return self._fail(
            request, InternalError(f"the model computed NaN or infinity {place}; the request ends")
        )

    def _fail_lost(self, request: Request, failure: str) -> StepOutput:
        # Computed with those blocks missing: the result is arbitrary and may contain NaN.
        self.runner.scrub(self._tables.private_blocks(request))
        place = f"after {request.num_output} output tokens"
        return self._fail(
            request,
            InternalError(
                f"the sequence is longer than the KV cache, and {failure}; it ends {place}"
            ),
        )

    def stats(self) -> dict[str, float]:
        """Return counts since start and the current state.

        Seconds: `step_seconds` of the last step, `model_seconds` of all forward passes,
        `python_seconds` for which the model stood idle between steps although there was work.
        """
        stats = {
            "blocks_total": self.pool.num_blocks,
            "blocks_free": self.pool.num_free,
            "blocks_cached": self.pool.num_idle,
            "evictions": self.pool.evictions,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "out_of_credit": self.scheduler.num_out_of_credit,
            "preemptions": self.scheduler.preemptions,
            "recomputed_tokens": self.prefix_cache.ghosts.recomputed
            if self.prefix_cache is not None
            else 0,
            **asdict(self._counts),
            "kv_bytes": self.runner.kv.nbytes,
            "weight_bytes": self._weight_bytes,
            "resident_bytes": _resident_bytes(),
            **self.receiver.stats(),
            **self.sender.stats(),
            **self._cutter.stats(),
            **(self.speculation.stats() if self.speculation is not None else {}),
        }
        if self._offload is not None:
            stats |= {
                "host_cache_bytes": self._offload.host_bytes,
                "disk_cache_bytes": self._offload.disk_bytes,
                "blocks_loaded": self._offload.loads,
                "blocks_damaged": self._offload.damaged,
            }
        if self._spill is not None:
            stats |= self._spill.stats()
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
        self.receiver.check_integrity()
        if self.speculation is not None:
            self.speculation.check_integrity(set(self._requests.values()))


def _limits(config: EngineConfig) -> Limits:
    return Limits(**{field.name: getattr(config, field.name) for field in fields(Limits)})


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
