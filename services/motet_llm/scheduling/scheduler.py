"""Schedule the next step: continuous batching with chunked prefill under one token budget.

Rank is priority, then arrival. Decode tokens go first, then prefill chunks of running requests,
then newly admitted requests. Among the latter two, the tenant that was served the fewest tokens
goes first, and of its requests those that were interrupted. A request that another tenant's streams
crowd out is admitted before running prefills continue. Where the step would be long because of
those streams, they also rest, in every second step at most.

When blocks run out, requests out of credit are preempted first, then those of the lowest rank, so
the request of the highest rank always makes progress. A preempted request waits at its old rank.
What it computed stays in the prefix cache as long as the blocks are not needed; the rest is
computed again, and no output is lost.

A waiting request preempts a running one in two cases: the running one has a lower priority, or the
waiting one's tenant runs nothing while the other's tenant runs several requests.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, itemgetter

from motet_llm.cache.block_tables import BlockTables
from motet_llm.cache.prefix_cache import PrefixCache
from motet_llm.engine.request import Request, Status
from motet_llm.speculation.speculative_row import Row, SpeculativeRow
from motet_shared.errors import InternalError, Overloaded

from .fairness import FairShares, tenant_group
from .step_time import StepTimeEstimate

_rank = attrgetter("rank")
SMALLEST_CHUNK = (
    32  # tokens: 8 or 16 take as long (beside four streams of pocket-chat, on a Zen 3: 3.6 ms)
)
URGENT_SLOWDOWN = 5.0  # multiplier on decode_slowdown for urgent requests


@dataclass(slots=True, frozen=True)
class Work:
    """Compute the next `num_tokens` tokens of `request`.

    If those are all its uncomputed tokens, draw the next one, unless the prompt is computed for
    another engine.

    draft: tokens that may come next. They are computed too and counted in `num_tokens`; a token is
        drawn after each of them.
    """

    request: Request
    num_tokens: int
    draft: tuple[int, ...] = ()

    @property
    def draws(self) -> bool:
        """Return True if a token is drawn after the last computed one."""
        return (
            self.num_tokens - len(self.draft) == self.request.num_uncomputed
            and self.request.sent < 0
        )

    @property
    def rows(self) -> list[Row]:
        """Return the rows that draw tokens: the request, and a speculative row per draft token."""
        if not self.draws:
            return []
        return [
            self.request,
            *(SpeculativeRow(self.request, self.draft[:n]) for n in range(1, 1 + len(self.draft))),
        ]

    @property
    def tokens(self) -> list[int]:
        """Return the tokens to compute."""
        return [*self.request.tokens[slice(*self.span)], *self.draft]

    @property
    def span(self) -> tuple[int, int]:
        """Return the positions of the first token to compute and of the one after the last."""
        return self.request.num_computed, self.request.num_computed + self.num_tokens


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a scheduler; see `EngineConfig` for the meaning of each field."""

    token_budget: int
    max_running: int
    max_waiting: int
    decode_slowdown: float = 0.0
    latency_goal: float = 0.0
    static_batching: bool = False
    contiguous_kv: bool = False


class _Budget:
    """Bound the tokens prefilled in a step, to limit the slowdown of streams that decode.

    An urgent request may slow them down more (`PATIENCE`). Urgent is a request that was
    interrupted: it was moved here or preempted, and its stream stands still meanwhile. So is one
    that is crowded out: the streams it slows down are mostly of one tenant, which was served at
    least as much.

    streams: requests that decode in the step.
    spent: tokens prefilled so far by all requests together.
    """

    def __init__(
        self, limits: Limits, pace: StepTimeEstimate, shares: FairShares, streams: Sequence[Request]
    ):
        self.spent = 0
        self._limits, self._pace, self._shares, self._streams = limits, pace, shares, streams
        self._most = limits.token_budget - len(streams)
        self._is_smooth = bool(streams and limits.decode_slowdown)
        self._chunks: dict[bool, int] = {}  # by whether the request is urgent

    def left(self, *, urgent: bool = False) -> int:
        """Return the tokens left to prefill; 0 or less if there are none."""
        if not self._is_smooth:
            return self._most - self.spent
        if urgent not in self._chunks:
            self._chunks[urgent] = self._chunk(urgent)
        return self._chunks[urgent] - self.spent

    def _chunk(self, urgent: bool) -> int:
        if not urgent and self._pace.needs_decode_sample(len(self._streams)):
            return 0
        slowdown = self._limits.decode_slowdown * (URGENT_SLOWDOWN if urgent else 1.0)
        chunk = self._pace.chunk(len(self._streams), slowdown, self._limits.latency_goal)
        return int(min(self._most, max(SMALLEST_CHUNK, chunk)))

    def left_for(self, request: Request) -> int:
        return self.left(urgent=request.num_output > 0 or self.is_crowded_out(request))

    def is_crowded_out(self, request: Request) -> bool:
        """Return True if another tenant's streams crowd out the request.

        Its tenant has no stream here and was served no more than the dominant group, and no stream has a
        higher priority.
        """
        tenant = tenant_group(request.tenant)
        if (
            self.dominant_group is None
            or tenant in self._tenants
            or any(r.priority > request.priority for r in self._streams)
        ):
            return False
        return self._shares.served_to_group(tenant) <= self._shares.served_to_group(
            self.dominant_group
        )

    @property
    def is_long(self) -> bool:
        """Return True if at least half of the step's time is due to the number of its streams."""
        pace = self._pace
        return (
            self._is_smooth and pace.decode_step(len(self._streams)) >= 2 * pace.decode_step(1) > 0
        )

    @cached_property
    def dominant_group(self) -> str | None:
        """Return the tenant group with several streams and at least half of all, or None."""
        tenant, count = max(self._tenants.items(), key=itemgetter(1), default=("", 0))
        return tenant if count > 1 and 2 * count >= len(self._streams) else None

    @cached_property
    def _tenants(self) -> Counter[str]:
        return Counter(tenant_group(request.tenant) for request in self._streams)


class Scheduler:
    """Keep requests in `waiting` and `running`, both sorted by rank, and plan each step.

    Requests out of credit stay in either list and are passed over.

    hand_over: called when a request is admitted; returns True if a prefill worker computes its
        prompt.
    """

    def __init__(
        self,
        tables: BlockTables,
        limits: Limits,
        prefix_cache: PrefixCache | None = None,
        pace: StepTimeEstimate | None = None,
    ):
        self.limits = limits
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0
        self.counts = FairShares()
        self.pace = pace or StepTimeEstimate()
        self.hand_over: Callable[[Request], bool] = lambda request: False
        self._tables = tables
        self._prefix_cache = prefix_cache
        self._works: dict[Request, Work] = {}
        self._dominant_rested = (
            False  # whether the dominant group's streams rested in the last step
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises Overloaded when the queue is full."""
        if len(self.waiting) >= self.limits.max_waiting:
            raise Overloaded(
                f"{len(self.waiting)} requests wait already (max_waiting={self.limits.max_waiting}); try later"
            )
        self.counts.enter(request.tenant)
        insort(self.waiting, request, key=_rank)

    def finish(self, request: Request) -> None:
        """Remove a request from whichever list it is in and free what it holds."""
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        request.status = Status.FINISHED
        self._release(request)
        self.counts.leave(request.tenant)

    @property
    def has_work(self) -> bool:
        """Return True if `schedule` would find something to run now."""
        if any(not r.is_idle for r in self.running):
            return True
        request = self._next_arrival()
        if request is None or not any(r.receiving for r in self.running):
            return request is not None
        return self._room_for(request) is not None

    @property
    def num_out_of_credit(self) -> int:
        """Return the number of requests out of credit."""
        return sum(r.out_of_credit for r in [*self.running, *self.waiting])

    def tokens_before(self, request: Request) -> int:
        """Return the fewest tokens to prefill before a new request draws its first token.

        Those are its own and those of requests that certainly go first.
        """
        first = (
            r
            for r in self.waiting
            if r.tenant == request.tenant and r.rank < request.rank and not r.out_of_credit
        )
        return request.num_uncomputed + sum(r.num_uncomputed for r in first)

    def tokens_to_prefill(self, least_priority: int) -> int:
        """Return the tokens to prefill of all requests of at least a priority; thread-safe."""
        requests = [*self.running, *self.waiting]
        due = (
            r.num_uncomputed for r in requests if r.priority >= least_priority and not r.receiving
        )
        return sum(count for count in due if count > 1)

    # ------------------------------------------------------------------------------------------------------ one step
    def schedule(self) -> list[Work]:
        """Plan one step within budget and blocks: a `Work` per request, single tokens first."""
        active = [r for r in self.running if not r.is_idle][: self.limits.max_running]
        for request in active:
            if request.num_uncomputed == 1:
                self._plan(request, 1)
        budget = _Budget(self.limits, self.pace, self.counts, list(self._works))
        may_begin = not (self.limits.static_batching and active)
        if may_begin and self.waiting and budget.dominant_group is not None:
            self._begin(budget, budget.is_crowded_out)
        self._dominant_rested = budget.spent > 0 and budget.is_long and not self._dominant_rested
        if self._dominant_rested:
            for stream in [
                r for r in self._works if tenant_group(r.tenant) == budget.dominant_group
            ]:
                self._leave_out(stream)
        for request in sorted((r for r in active if r.num_uncomputed > 1), key=self._turn):
            budget.spent += self._plan(request, self._chunk(request, budget.left_for(request)))
        if may_begin and (budget.left() > 0 or any(r.num_output for r in self.waiting)):
            self._begin(budget)
        works, self._works = self._works, {}
        return sorted(works.values(), key=lambda work: work.num_tokens > 1)

    def _begin(self, budget: _Budget, may: Callable[[Request], bool] = lambda _: True) -> None:
        """Admit waiting requests for which `may` holds, while tokens and blocks are left."""
        while (request := self._next_arrival()) is not None and may(request):
            left = budget.left_for(request)
            if left <= 0 or not self._admit(request):
                return
            if not request.receiving:
                planned = self._plan(request, self._chunk(request, left))
                if not planned:
                    return
                budget.spent += planned

    def _turn(self, request: Request) -> tuple[int, tuple[int, int], bool, int]:
        """Return the sort key of requests that compete for prefill.

        Among the requests of a tenant, interrupted ones go first.
        """
        return (
            -request.priority,
            self.counts.served(request.tenant),
            not request.num_output,
            request.arrival,
        )

    def _chunk(self, request: Request, budget: int) -> int:
        """Return how many of its tokens a request prefills in this step.

        With snapshots of recurrent states a chunk ends at a block boundary if it reaches one: only
        there can a prefix match use the state.
        """
        count = min(budget, request.num_due)
        if self._prefix_cache is not None and self._prefix_cache.wants_whole_blocks and count > 1:
            end = request.num_computed + count
            whole = end - end % self._tables.block_size
            if whole > request.num_computed:
                return whole - request.num_computed
        return count

    def widen(self, works: Sequence[Work], drafts: Mapping[Request, Sequence[int]]) -> list[Work]:
        """Add drafts to the works of a step as far as budget and free blocks reach.

        No request is preempted for a draft.
        """
        left = self.limits.token_budget - sum(work.num_tokens for work in works)
        widened = []
        for work in works:
            draft = self._that_fits(work, tuple(drafts.get(work.request, ())[: max(left, 0)]))
            left -= len(draft)
            widened.append(
                Work(work.request, work.num_tokens + len(draft), draft) if draft else work
            )
        return sorted(widened, key=lambda work: work.num_tokens > 1)

    def _that_fits(self, work: Work, draft: tuple[int, ...]) -> tuple[int, ...]:
        """Return the beginning of a draft for which there are free blocks, and allocate them."""
        _, end = work.span
        while (
            draft and self._tables.missing(work.request, end + len(draft)) > self._tables.num_free
        ):
            draft = draft[:-1]
        if draft:
            self._tables.grow(work.request, end + len(draft))
        return draft

    def take_back(self, request: Request) -> None:
        """Free the blocks that hold only rejected draft tokens."""
        if not self.limits.contiguous_kv:
            self._tables.cut(request)

    def _plan(self, request: Request, num_tokens: int) -> int:
        """Allocate blocks for `num_tokens` more tokens, preempting others if needed.

        Returns the number of tokens that will be computed: `num_tokens` or 0.
        """
        if num_tokens <= 0 or request.status is not Status.RUNNING:
            return 0
        end = request.num_computed + num_tokens
        if not self.make_room(request, end):
            return 0
        self._tables.grow(request, end)
        self._works[request] = Work(request, num_tokens)
        self.counts.serve(request.tenant, num_tokens)
        return num_tokens

    def make_room(self, request: Request, end: int, *, passed: bool = False) -> bool:
        """Preempt requests until the tables can grow up to token `end`.

        Returns False if the request itself was preempted, or if its first blocks cannot be spilled:
        the request is lost then.

        passed: as in `BlockTables.missing`.
        """
        while self._tables.to_spill(request, end) > self._tables.spill_room:
            victim = next(
                r for r in reversed(self.running) if r is request or r.spilled is not None
            )
            self._preempt(victim)
            if victim is request:
                return False
        if not self._tables.spill(request, end):
            return False
        while self._tables.missing(request, end, passed=passed) > self._tables.num_free:
            victim = self._victim()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _victim(self) -> Request:
        """Return the request of the lowest rank, of those out of credit if there are any."""
        return next((r for r in reversed(self.running) if r.out_of_credit), self.running[-1])

    def _leave_out(self, request: Request) -> None:
        work = self._works.pop(request, None)
        if work is not None:
            self.counts.serve(request.tenant, -work.num_tokens)

    def _preempt(self, request: Request) -> None:
        self._leave_out(request)
        self.running.remove(request)
        self._release(request)
        request.num_computed = 0
        request.status = Status.WAITING
        request.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, request, key=_rank)

    # ----------------------------------------------------------------------------------------------------- admission
    def _admit(self, request: Request) -> bool:
        """Move the next waiting request to `running` if there is room. None overtakes it."""
        victims = self._room_for(request)
        if victims is None:
            return False
        for victim in victims:
            self._preempt(victim)
        self.waiting.remove(request)
        request.status = Status.RUNNING
        insort(self.running, request, key=_rank)
        self._tables.open(request)
        is_long = self._tables.is_long(len(request.tokens))
        if self._prefix_cache is not None and not is_long:
            self._prefix_cache.take(
                request, self._prefix_cache.match(request.findable, request.root)
            )
        if request.num_cached is None:
            request.num_cached = min(request.num_computed, request.num_prompt)
        if self.limits.contiguous_kv:
            self._tables.grow(request, request.max_length)
        elif not is_long:
            self.hand_over(request)
        return True

    def _next_arrival(self) -> Request | None:
        """Return the waiting request that goes next, or None."""
        return min((r for r in self.waiting if not r.out_of_credit), key=self._turn, default=None)

    def _room_for(self, request: Request) -> list[Request] | None:
        """Return the requests to preempt so that `request` fits; None if it cannot fit."""
        needed = self._blocks_needed(request)
        victims: list[Request] = []
        candidates = self._may_give_way_to(request)
        while not (self._fits(needed, victims) and self._can_spill(request, victims)):
            victim = next(candidates, None)
            if victim is None:
                return None
            victims.append(victim)
        return victims

    def _blocks_needed(self, request: Request) -> int:
        """Return an upper bound of the free blocks that the request takes.

        Blocks that it shares with running requests are not counted where that matters for
        admission.
        """
        length = request.max_length if self.limits.contiguous_kv else len(request.tokens)
        needed = self._tables.blocks_for(length)
        if self._prefix_cache is None or needed <= self._tables.num_free - self._promised([]):
            return needed
        if self._tables.is_long(length):
            return needed
        return needed - self._prefix_cache.num_held(
            self._prefix_cache.match(request.findable, request.root)
        )

    def _fits(self, needed: int, victims: list[Request]) -> bool:
        """Return True if a request of `needed` blocks could run with `victims` preempted."""
        stay = [r for r in self.running if r not in victims]
        if (
            len(stay) >= self._tables.max_open
            or sum(not r.out_of_credit for r in stay) >= self.limits.max_running
        ):
            return False
        freed = sum(self._tables.num_unshared(r) for r in victims)
        return needed <= self._tables.num_free + freed - self._promised(victims)

    def _can_spill(self, request: Request, victims: list[Request]) -> bool:
        """Return True if what the pool cannot hold fits into the tiers without `victims`."""
        due = self._tables.still_to_spill(request)
        if not due:
            return True
        promised = sum(self._tables.still_to_spill(r) for r in self.running if r not in victims)
        freed = sum(r.spilled.num_blocks for r in victims if r.spilled is not None)
        return due + promised <= self._tables.spill_room + freed

    def _promised(self, victims: list[Request]) -> int:
        """Return the blocks that requests which still prefill will allocate."""
        prefilling = (r for r in self.running if r.num_uncomputed > 1 and r not in victims)
        return sum(map(self._tables.outstanding, prefilling))

    def _may_give_way_to(self, request: Request) -> Iterator[Request]:
        """Yield the running requests that `request` may preempt.

        First those out of credit, then those that it outranks by priority, then one of a tenant
        with several if its own tenant runs nothing.
        """
        yield from (r for r in reversed(self.running) if r.out_of_credit)
        if self.limits.static_batching:
            return
        busy = [r for r in reversed(self.running) if not r.out_of_credit]
        yield from (r for r in busy if r.priority < request.priority)
        places = Counter(tenant_group(r.tenant) for r in busy)
        if busy and not places[tenant_group(request.tenant)]:
            largest, most = places.most_common(1)[0]
            equals = (
                r
                for r in busy
                if tenant_group(r.tenant) == largest and r.priority == request.priority
            )
            if most > 1 and (youngest := next(equals, None)) is not None:
                yield youngest

    def _release(self, request: Request) -> None:
        if self._prefix_cache is not None:
            self._prefix_cache.release(request)
        self._tables.close(request)
        if request.watch is not None:
            request.watch.clear()
        request.num_published = 0
        request.receiving = False

    # ----------------------------------------------------------------------------------------------------- integrity
    def check_integrity(self) -> None:
        """Raise InternalError unless lists, states, block tables and pool agree."""
        for requests, status in ((self.running, Status.RUNNING), (self.waiting, Status.WAITING)):
            if (
                any(r.status is not status for r in requests)
                or sorted(requests, key=_rank) != requests
            ):
                raise InternalError(f"the list of {status.value} requests is out of order")
        if any(r.tables or r.num_computed for r in self.waiting):
            raise InternalError("a waiting request holds blocks")
        self._tables.check_integrity(self.running)
        if self._prefix_cache is not None:
            self._prefix_cache.check_integrity()
