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

Background requests (`background`) rest while another request can run, up to a few steps.

`budget` bounds what a step prefills, `preemption` chooses who gives way, and `queues` holds the
requests. Features constrain single requests by `Request.constraints`, and take part in admission as
`AdmissionPolicy`; the scheduler knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from motet_llm.cache.block_tables import BlockTables
from motet_llm.cache.prefix_cache import PrefixCache
from motet_llm.engine.request import Request, Status

from .background import BackgroundTurns, is_background
from .budget import SchedulerLimits, TokenBudget
from .fairness import tenant_group
from .preemption import Preemption
from .queues import ReleasePolicy, RequestQueues
from .step_time import StepTimeEstimate
from .work import Work


class AdmissionPolicy(ReleasePolicy, Protocol):
    """Define what a feature does when a request gets its blocks, and when it loses them."""

    def admitted(self, request: Request, scheduler: Scheduler) -> None:
        """Constrain a request that has just been admitted, with its cached prefix in its tables."""


class Scheduler:
    """Plan the steps of the requests in `waiting` and `running`, both sorted by rank.

    Requests out of credit stay in either list and are passed over.
    """

    def __init__(
        self,
        tables: BlockTables,
        limits: SchedulerLimits,
        prefix_cache: PrefixCache | None = None,
        pace: StepTimeEstimate | None = None,
        policies: Sequence[AdmissionPolicy] = (),
    ):
        self.limits = limits
        self.pace = pace or StepTimeEstimate()
        self._queues = RequestQueues(tables, prefix_cache, policies, limits.max_waiting)
        self.waiting, self.running = self._queues.waiting, self._queues.running
        self.shares = self._queues.shares
        self._background = BackgroundTurns(self.pace)
        self._preemption = Preemption(self._queues, tables, limits, prefix_cache)
        self._tables = tables
        self._prefix_cache = prefix_cache
        self._policies = tuple(policies)
        self._works: dict[Request, Work] = {}
        self._dominant_rested = False  # whether the dominant group's streams rested last time

    def add(self, request: Request) -> None:
        """Queue a request. Raises Overloaded when the queue is full."""
        self._queues.add(request)

    def finish(self, request: Request) -> None:
        """Remove a request from whichever list it is in and free what it holds."""
        self._queues.remove(request)

    @property
    def preemptions(self) -> int:
        """Return the number of preemptions since the start."""
        return self._queues.preemptions

    @property
    def has_work(self) -> bool:
        """Return True if `schedule` would find something to run now."""
        if any(not r.is_idle for r in self.running):
            return True
        request = self._next_arrival()
        held = (r.constraints.on_hold or r.constraints.awaits_input for r in self.running)
        if request is None or not any(held):
            return request is not None
        return self._preemption.victims_for(request) is not None

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
            r.num_uncomputed
            for r in requests
            if r.priority >= least_priority and not r.constraints.on_hold
        )
        return sum(count for count in due if count > 1)

    # ------------------------------------------------------------------------------------------------------ one step
    def schedule(self) -> list[Work]:
        """Plan one step within budget and blocks: a `Work` per request, single tokens first."""
        active = [r for r in self.running if not r.is_idle][: self.limits.max_running]
        if self._background.is_shared(active, self.waiting):
            return self._schedule(active, lambda _: True)
        works = self._schedule(self._background.joining(active), lambda r: not is_background(r))
        # What waits may not fit: then background requests go on, so that they end.
        return works or self._schedule(active, lambda _: True)

    def _schedule(
        self, active: Sequence[Request], may_start: Callable[[Request], bool]
    ) -> list[Work]:
        """Plan a step of the running requests `active` and the waiting ones that may start."""
        may_admit = not (self.limits.static_batching and active)
        self._plan_decodes(active)
        budget = TokenBudget(self.limits, self.pace, self.shares, list(self._works))
        if may_admit and self.waiting and budget.dominant_group is not None:
            self._admit(budget, lambda r: may_start(r) and budget.is_crowded_out(r))
        self._rest_dominant_group(budget)
        self._plan_prefills(active, budget)
        if may_admit and (budget.left() > 0 or any(r.num_output for r in self.waiting)):
            self._admit(budget, may_start)
        works, self._works = self._works, {}
        return sorted(works.values(), key=lambda work: work.num_tokens > 1)

    def _plan_decodes(self, active: Sequence[Request]) -> None:
        for request in active:
            if request.num_uncomputed == 1:
                self._plan(request, 1)

    def _plan_prefills(self, active: Sequence[Request], budget: TokenBudget) -> None:
        for request in sorted((r for r in active if r.num_uncomputed > 1), key=self._turn):
            budget.spent += self._plan(request, self._chunk(request, budget.left_for(request)))

    def _rest_dominant_group(self, budget: TokenBudget) -> None:
        """Leave the dominant group's streams out of a long step, in every second one at most."""
        self._dominant_rested = budget.spent > 0 and budget.is_long and not self._dominant_rested
        if self._dominant_rested:
            group = budget.dominant_group
            for stream in [r for r in self._works if tenant_group(r.tenant) == group]:
                self._leave_out(stream)

    def _turn(self, request: Request) -> tuple[int, tuple[int, int], bool, int]:
        """Return the sort key of requests that compete for prefill.

        Among the requests of a tenant, interrupted ones go first.
        """
        return (
            -request.priority,
            self.shares.served(request.tenant),
            not request.num_output,
            request.arrival,
        )

    def _chunk(self, request: Request, budget: int) -> int:
        """Return how many of its tokens a request prefills in this step.

        With snapshots of recurrent states a chunk ends at a block boundary if it reaches one: only
        there can a prefix match use the state. A picture whose tokens see all of it is not cut: it
        may be more than the budget.
        """
        count = min(budget, request.num_due)
        if request.images is not None:
            count = request.images.uncut(request.num_computed, count)
        if self._prefix_cache is not None and self._prefix_cache.wants_whole_blocks and count > 1:
            end = request.num_computed + count
            whole = end - end % self._tables.block_size
            if whole > request.num_computed:
                return whole - request.num_computed
        return count

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
        self.shares.serve(request.tenant, num_tokens)
        return num_tokens

    def _leave_out(self, request: Request) -> None:
        work = self._works.pop(request, None)
        if work is not None:
            self.shares.serve(request.tenant, -work.num_tokens)

    # ----------------------------------------------------------------------------------------------------- preemption
    def make_room(self, request: Request, end: int, *, passed: bool = False) -> bool:
        """Preempt requests until the tables can grow up to token `end`.

        Returns False if the request itself was preempted, or if its first blocks cannot be spilled:
        the request is lost then.

        passed: as in `BlockTables.missing`.
        """
        while self._tables.to_spill(request, end) > self._tables.spill_room:
            if self._preempt(self._preemption.spill_victim(request)) is request:
                return False
        if not self._tables.spill(request, end):
            return False
        while self._tables.missing(request, end, passed=passed) > self._tables.num_free:
            if self._preempt(self._preemption.victim()) is request:
                return False
        return True

    def restart(self, request: Request) -> None:
        """Compute a running request again from its first token, once it is its turn."""
        self._preempt(request)

    def _preempt(self, request: Request) -> Request:
        self._leave_out(request)
        self._queues.preempt(request)
        return request

    # ----------------------------------------------------------------------------------------------------- admission
    def _next_arrival(self) -> Request | None:
        """Return the waiting request that goes next, or None."""
        return min((r for r in self.waiting if not r.out_of_credit), key=self._turn, default=None)

    def _admit(self, budget: TokenBudget, may: Callable[[Request], bool]) -> None:
        """Admit waiting requests for which `may` holds, while tokens and blocks are left."""
        while (request := self._next_arrival()) is not None and may(request):
            left = budget.left_for(request)
            if left <= 0 or not self._start(request):
                return
            if not request.constraints.on_hold:
                planned = self._plan(request, self._chunk(request, left))
                if not planned:
                    return
                budget.spent += planned

    def _start(self, request: Request) -> bool:
        """Move the next waiting request to `running` if there is room. None overtakes it."""
        victims = self._preemption.victims_for(request)
        if victims is None:
            return False
        for victim in victims:
            self._preempt(victim)
        self._queues.start(request)
        is_long = self._tables.is_long(len(request.tokens))
        if self._prefix_cache is not None and not is_long:
            match = self._prefix_cache.match(request.matchable, request.root)
            self._prefix_cache.take(request, match)
        if request.num_cached is None:
            request.num_cached = min(request.num_computed, request.num_prompt)
        if self.limits.contiguous_kv:
            self._tables.grow(request, request.max_length)
        elif not is_long:
            for policy in self._policies:
                policy.admitted(request, self)
        return True

    # -------------------------------------------------------------------------------------------------------- drafts
    def add_drafts(
        self, works: Sequence[Work], drafts: Mapping[Request, Sequence[int]]
    ) -> list[Work]:
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
        most = work.request.constraints.drafts_end
        if most is not None:
            draft = draft[: max(0, most - end)]
        while (
            draft and self._tables.missing(work.request, end + len(draft)) > self._tables.num_free
        ):
            draft = draft[:-1]
        if draft:
            self._tables.grow(work.request, end + len(draft))
        return draft

    def take_back(self, request: Request, num_accepted: int) -> None:
        """Free the blocks that hold only rejected draft tokens; charge the tenant for the others.

        num_accepted: draft tokens of the last step that were accepted.
        """
        if not self.limits.contiguous_kv:
            self._tables.cut(request)
        self.shares.serve(request.tenant, num_accepted)

    def check_integrity(self) -> None:
        """Raise InternalError unless lists, states, block tables and pool agree."""
        self._queues.check_integrity()
        if self._prefix_cache is not None:
            self._prefix_cache.check_integrity()
