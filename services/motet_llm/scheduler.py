"""Who runs in the next step: continuous batching with chunked prefill under one token budget.

Rank is priority, then arrival. Decode tokens go first, then the chunks of those who prefill, then arrivals; among
these two the tenant that was served the fewest tokens goes first, and of its requests those that were interrupted. Who
is crowded out by another tenant's streams does not wait for those who prefill, nor, where that would take longer than
half of the step, for the streams: they rest, in every second step at most.
When blocks run out, paused requests give theirs up first, then those of the lowest rank, so the one of the highest rank
always makes progress. A preempted request waits at its old rank; what it computed stays in the prefix cache as long as
nobody needs the room, and the rest is computed again: nothing of it is lost.

A waiting request takes the place of a running one in two cases: that one has a lower priority, or the waiting one's
tenant runs nothing while the other's tenant runs several.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, itemgetter

from motet_shared.errors import InternalError, Overloaded

from .block_tables import BlockTables
from .fairness import Shares, house
from .pace import Pace
from .prefix_cache import PrefixCache
from .request import Request, Status
from .supposed import Row, Supposed

_rank = attrgetter("rank")
SMALLEST_CHUNK = 32  # tokens: 8 and 16 take as long (beside four streams of pocket-chat, on a Zen 3: 3.6 ms)
PATIENCE = 5.0  # times as much as for others may streams be slowed down for one that is urgent


@dataclass(slots=True, frozen=True)
class Work:
    """Compute the next `num_tokens` tokens of `request`; if those are all, draw one, unless they are for others.

    draft: tokens that may come next. They are computed too, `num_tokens` counts them, and behind each one is drawn.
    """

    request: Request
    num_tokens: int
    draft: tuple[int, ...] = ()

    @property
    def draws(self) -> bool:
        return self.num_tokens - len(self.draft) == self.request.num_uncomputed and self.request.sent < 0

    @property
    def rows(self) -> list[Row]:
        """What tokens are drawn for."""
        if not self.draws:
            return []
        return [self.request, *(Supposed(self.request, self.draft[:n]) for n in range(1, 1 + len(self.draft)))]

    @property
    def tokens(self) -> list[int]:
        """What is computed."""
        return [*self.request.tokens[slice(*self.span)], *self.draft]

    @property
    def span(self) -> tuple[int, int]:
        """First token to compute, and the one after the last."""
        return self.request.num_computed, self.request.num_computed + self.num_tokens


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a scheduler may do; see `EngineConfig` for the meaning of each."""

    token_budget: int
    max_running: int
    max_waiting: int
    decode_slowdown: float = 0.0
    latency_goal: float = 0.0
    static_batching: bool = False
    contiguous_kv: bool = False


class _Budget:
    """Tokens that may be prefilled in a step: few enough that streams that decode do not stutter.

    For an urgent request they may. One that was interrupted is: it was moved here or had to give way, and stands still
    meanwhile. And so is one that is crowded out: those who stutter are mostly of one tenant, which has had as much.

    streams: those that decode in the step. spent: by all together.
    """

    def __init__(self, limits: Limits, pace: Pace, shares: Shares, streams: Sequence[Request]):
        self.spent = 0
        self._limits, self._pace, self._shares, self._streams = limits, pace, shares, streams
        self._most = limits.token_budget - len(streams)
        self._is_smooth = bool(streams and limits.decode_slowdown)
        self._chunks: dict[bool, int] = {}  # by whether it is for urgent ones

    def left(self, *, urgent: bool = False) -> int:
        """0 and less: none."""
        if not self._is_smooth:
            return self._most - self.spent
        if urgent not in self._chunks:
            self._chunks[urgent] = self._chunk(urgent)
        return self._chunks[urgent] - self.spent

    def _chunk(self, urgent: bool) -> int:
        if not urgent and self._pace.wants_to_look(len(self._streams)):
            return 0
        slowdown = self._limits.decode_slowdown * (PATIENCE if urgent else 1.0)
        chunk = self._pace.chunk(len(self._streams), slowdown, self._limits.latency_goal)
        return int(min(self._most, max(SMALLEST_CHUNK, chunk)))

    def left_for(self, request: Request) -> int:
        return self.left(urgent=request.num_output > 0 or self.is_crowded_out(request))

    def is_crowded_out(self, request: Request) -> bool:
        """Its tenant has no stream here and was served no more than the crowd; and no stream goes before it."""
        tenant = house(request.tenant)
        if self.crowd is None or tenant in self._tenants or any(r.priority > request.priority for r in self._streams):
            return False
        return self._shares.of_house(tenant) <= self._shares.of_house(self.crowd)

    @property
    def is_long(self) -> bool:
        """Most of what a step of these streams takes is for their number."""
        pace = self._pace
        return self._is_smooth and pace.decode_step(len(self._streams)) >= 2 * pace.decode_step(1) > 0

    @cached_property
    def crowd(self) -> str | None:
        """The tenant that has several of the streams, and at least half of them, if there is one."""
        tenant, count = max(self._tenants.items(), key=itemgetter(1), default=("", 0))
        return tenant if count > 1 and 2 * count >= len(self._streams) else None

    @cached_property
    def _tenants(self) -> Counter[str]:
        return Counter(house(request.tenant) for request in self._streams)


class Scheduler:
    """`waiting` and `running` are sorted by rank; paused requests stay in either and are passed over.

    hand_over: asked when a request is admitted; if it says so, somebody else computes the prompt (`receiver`).
    """

    def __init__(
        self, tables: BlockTables, limits: Limits, prefix_cache: PrefixCache | None = None, pace: Pace | None = None
    ):
        self.limits = limits
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0
        self.counts = Shares()
        self.pace = pace or Pace()
        self.hand_over: Callable[[Request], bool] = lambda request: False
        self._tables = tables
        self._prefix_cache = prefix_cache
        self._works: dict[Request, Work] = {}
        self._crowd_rests = False  # in the last step that was scheduled

    def add(self, request: Request) -> None:
        """Queue a request. Raises Overloaded when the queue is full."""
        if len(self.waiting) >= self.limits.max_waiting:
            raise Overloaded(
                f"{len(self.waiting)} requests wait already (max_waiting={self.limits.max_waiting}); try later"
            )
        self.counts.enter(request.tenant)
        insort(self.waiting, request, key=_rank)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and free what it holds."""
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        request.status = Status.FINISHED
        self._release(request)
        self.counts.leave(request.tenant)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would find something to run now."""
        if any(not r.is_idle for r in self.running):
            return True
        request = self._next_arrival()
        if request is None or not any(r.receiving for r in self.running):
            return request is not None
        return self._room_for(request) is not None

    @property
    def num_paused(self) -> int:
        return sum(r.paused for r in [*self.running, *self.waiting])

    def tokens_before(self, request: Request) -> int:
        """Tokens to prefill, at the least, before a new request gets one: its own and those certain to go first."""
        first = (r for r in self.waiting if r.tenant == request.tenant and r.rank < request.rank and not r.paused)
        return request.num_uncomputed + sum(r.num_uncomputed for r in first)

    def tokens_to_prefill(self, least_priority: int) -> int:
        """Of all requests of at least a priority; from any thread."""
        requests = [*self.running, *self.waiting]
        due = (r.num_uncomputed for r in requests if r.priority >= least_priority and not r.receiving)
        return sum(count for count in due if count > 1)

    # ------------------------------------------------------------------------------------------------------ one step
    def schedule(self) -> list[Work]:
        """The work of one step within budget and blocks, one `Work` per request, those of a single token first."""
        active = [r for r in self.running if not r.is_idle][: self.limits.max_running]
        for request in active:
            if request.num_uncomputed == 1:
                self._plan(request, 1)
        budget = _Budget(self.limits, self.pace, self.counts, list(self._works))
        may_begin = not (self.limits.static_batching and active)
        if may_begin and self.waiting and budget.crowd is not None:
            self._begin(budget, budget.is_crowded_out)
        self._crowd_rests = budget.spent > 0 and budget.is_long and not self._crowd_rests
        if self._crowd_rests:
            for stream in [r for r in self._works if house(r.tenant) == budget.crowd]:
                self._leave_out(stream)
        for request in sorted((r for r in active if r.num_uncomputed > 1), key=self._turn):
            budget.spent += self._plan(request, self._chunk(request, budget.left_for(request)))
        if may_begin and (budget.left() > 0 or any(r.num_output for r in self.waiting)):
            self._begin(budget)
        works, self._works = self._works, {}
        return sorted(works.values(), key=lambda work: work.num_tokens > 1)

    def _begin(self, budget: _Budget, may: Callable[[Request], bool] = lambda _: True) -> None:
        """Admit who waits and may, as long as there are tokens left and room."""
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
        """Sorts requests that compete for prefilling; among those of a tenant, who was interrupted goes first."""
        return -request.priority, self.counts.served(request.tenant), not request.num_output, request.arrival

    def _chunk(self, request: Request, budget: int) -> int:
        """How many of its tokens a request prefills in this step.

        With snapshots of recurrent states a chunk ends where a block ends, if it gets so far: there they can be found.
        """
        count = min(budget, request.num_due)
        if self._prefix_cache is not None and self._prefix_cache.wants_whole_blocks and count > 1:
            end = request.num_computed + count
            whole = end - end % self._tables.block_size
            if whole > request.num_computed:
                return whole - request.num_computed
        return count

    def widen(self, works: Sequence[Work], drafts: Mapping[Request, Sequence[int]]) -> list[Work]:
        """The works of a step with drafts, as far as the budget and the free blocks reach: nobody gives way for one."""
        left = self.limits.token_budget - sum(work.num_tokens for work in works)
        widened = []
        for work in works:
            draft = self._that_fits(work, tuple(drafts.get(work.request, ())[: max(left, 0)]))
            left -= len(draft)
            widened.append(Work(work.request, work.num_tokens + len(draft), draft) if draft else work)
        return sorted(widened, key=lambda work: work.num_tokens > 1)

    def _that_fits(self, work: Work, draft: tuple[int, ...]) -> tuple[int, ...]:
        """The beginning of a draft for which there is room, which it gets."""
        _, end = work.span
        while draft and self._tables.missing(work.request, end + len(draft)) > self._tables.num_free:
            draft = draft[:-1]
        if draft:
            self._tables.grow(work.request, end + len(draft))
        return draft

    def take_back(self, request: Request) -> None:
        """Free the blocks that only a draft has filled, and what was wrong in it."""
        if not self.limits.contiguous_kv:
            self._tables.cut(request)

    def _plan(self, request: Request, num_tokens: int) -> int:
        """Find blocks for `num_tokens` more tokens, by preemption if need be. The number that will be computed."""
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
        """Have others give way until the tables can grow up to token `end`. False if the request itself had to.

        Or if its first blocks cannot be spilled: it is lost then.
        """
        while self._tables.to_spill(request, end) > self._tables.spill_room:
            victim = next(r for r in reversed(self.running) if r is request or r.spilled is not None)
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
        """The paused request of the lowest rank, else the request of the lowest rank."""
        return next((r for r in reversed(self.running) if r.paused), self.running[-1])

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
        """Move the waiting request whose turn it is to `running`, if there is room. No other one overtakes it."""
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
            self._prefix_cache.take(request, self._prefix_cache.match(request.findable, request.root))
        if request.num_cached is None:
            request.num_cached = min(request.num_computed, request.num_prompt)
        if self.limits.contiguous_kv:
            self._tables.grow(request, request.max_length)
        elif not is_long:
            self.hand_over(request)
        return True

    def _next_arrival(self) -> Request | None:
        """The waiting request whose turn it is."""
        return min((r for r in self.waiting if not r.paused), key=self._turn, default=None)

    def _room_for(self, request: Request) -> list[Request] | None:
        """Those who have to give way before the request fits; None if it does not fit then either."""
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
        """Free blocks that the request takes at most; what it shares with running ones is not among them."""
        length = request.max_length if self.limits.contiguous_kv else len(request.tokens)
        needed = self._tables.blocks_for(length)
        if self._prefix_cache is None or needed <= self._tables.num_free - self._promised([]):
            return needed
        if self._tables.is_long(length):
            return needed
        return needed - self._prefix_cache.num_held(self._prefix_cache.match(request.findable, request.root))

    def _fits(self, needed: int, victims: list[Request]) -> bool:
        """Whether a request that needs so many blocks could run if `victims` did not."""
        stay = [r for r in self.running if r not in victims]
        if len(stay) >= self._tables.max_open or sum(not r.paused for r in stay) >= self.limits.max_running:
            return False
        freed = sum(self._tables.num_unshared(r) for r in victims)
        return needed <= self._tables.num_free + freed - self._promised(victims)

    def _can_spill(self, request: Request, victims: list[Request]) -> bool:
        """Whether what does not fit into the pool of the request would fit into the tiers if `victims` did not run."""
        due = self._tables.still_to_spill(request)
        if not due:
            return True
        promised = sum(self._tables.still_to_spill(r) for r in self.running if r not in victims)
        freed = sum(r.spilled.num_blocks for r in victims if r.spilled is not None)
        return due + promised <= self._tables.spill_room + freed

    def _promised(self, victims: list[Request]) -> int:
        """Blocks that requests which still prefill will ask for."""
        prefilling = (r for r in self.running if r.num_uncomputed > 1 and r not in victims)
        return sum(map(self._tables.outstanding, prefilling))

    def _may_give_way_to(self, request: Request) -> Iterator[Request]:
        """Running requests whose place `request` may take: paused ones, then those that it ranks before by right."""
        yield from (r for r in reversed(self.running) if r.paused)
        if self.limits.static_batching:
            return
        busy = [r for r in reversed(self.running) if not r.paused]
        yield from (r for r in busy if r.priority < request.priority)
        places = Counter(house(r.tenant) for r in busy)
        if busy and not places[house(request.tenant)]:
            largest, most = places.most_common(1)[0]
            equals = (r for r in busy if house(r.tenant) == largest and r.priority == request.priority)
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
            if any(r.status is not status for r in requests) or sorted(requests, key=_rank) != requests:
                raise InternalError(f"the list of {status.value} requests is out of order")
        if any(r.tables or r.num_computed for r in self.waiting):
            raise InternalError("a waiting request holds blocks")
        self._tables.check_integrity(self.running)
        if self._prefix_cache is not None:
            self._prefix_cache.check_integrity()
