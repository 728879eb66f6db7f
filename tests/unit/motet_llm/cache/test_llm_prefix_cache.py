"""Prefix cache, block tables and offload tiers together: whatever happens, a request reads what its own tokens make.

A model stands in that computes nothing: what it stores for a token is a number made of that token and all before it.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_llm.adapters.bank import ResidentAdapter
from motet_llm.cache import prefix_cache
from motet_llm.cache.block_pool import BlockPool
from motet_llm.cache.block_tables import BlockTables
from motet_llm.cache.kv_cache import KvCache, LayerShape
from motet_llm.cache.offload import Offload
from motet_llm.cache.prefix_cache import PrefixCache, evict_to
from motet_llm.cache.prefix_tree import Entry, Node, PrefixTree
from motet_llm.cache.state_cache import StateCache, StateShape
from motet_llm.engine.request import Request, Status
from motet_llm.scheduling.budget import SchedulerLimits
from motet_llm.scheduling.scheduler import Scheduler
from motet_llm.scheduling.work import Work
from motet_shared.messages import Sampling
from motet_shared.text import prefixes

SIZE = 4
WINDOW = 6
FULL = {0: LayerShape(1, 1, 1), 1: LayerShape(1, 1, 1)}
MIXED = {0: LayerShape(1, 1, 1), 1: LayerShape(1, 1, 1, WINDOW), 2: LayerShape(1, 1, 1, WINDOW)}
WINDOWED = {0: LayerShape(1, 1, 1, WINDOW)}


ADAPTERS = (None, None, ResidentAdapter("a", 0, root=11), ResidentAdapter("b", 1, root=12))


def content(request: Request, position: int) -> float:
    """What the stand-in stores for a token: exact in float32, and other for another beginning or adapter."""
    return float(hash((request.root, *request.tokens[: position + 1])) % (1 << 24))


class Stack:
    """Pool, tables, caches and scheduler, and the model that computes nothing."""

    def __init__(
        self,
        shapes: dict[int, LayerShape] = FULL,
        num_blocks: int = 24,
        tiers: dict[str, Any] | None = None,
        recurrent: bool = False,
        **limits: Any,
    ):
        self.kv = KvCache(shapes, num_blocks, SIZE, torch.float32)
        self.tree = PrefixTree(len(self.kv.groups), num_blocks)
        self.offload = Offload(**tiers, on_drop=self.tree.drop_copy) if tiers else None
        self.pool = BlockPool(num_blocks, SIZE, evict_to(self.tree, self.kv, self.offload))
        self.states = (
            StateCache({9: StateShape(((1,),), torch.float32)}, 4, 4) if recurrent else None
        )
        defaults = {"token_budget": 16, "max_running": 4, "max_waiting": 100}
        self.limits = SchedulerLimits(**{**defaults, **limits})
        max_open = self.limits.max_running if recurrent else 1 << 30
        self.tables = BlockTables(
            self.pool,
            self.kv.layout,
            step_tokens=self.limits.token_budget,
            states=self.states,
            max_open=max_open,
        )
        self.cache = PrefixCache(self.tree, self.pool, self.kv, self.offload, self.states)
        self.scheduler = Scheduler(self.tables, self.limits, self.cache)
        self.arrivals = 0
        self.computed = 0

    def add(self, tokens: list[int], output: int = 1, **options: Any) -> Request:
        request = Request(
            self.arrivals,
            self.arrivals,
            tokens,
            Sampling(),
            max_length=len(tokens) + output,
            **options,
        )
        self.arrivals += 1
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        for work in self.scheduler.schedule():
            self._compute(work)

    def _compute(self, work: Work) -> None:
        request = work.request
        self.check_reads(request)
        draws = work.draws
        for position in range(request.num_computed, request.num_computed + work.num_tokens):
            value = torch.full((1, 1, 1), content(request, position))
            for g, group in enumerate(self.kv.groups):
                block = request.tables[g][position // SIZE]
                assert self.pool.is_private(block), "a shared block is written"
                for layer in group.layers:
                    self.kv.write(
                        layer, value, value, torch.tensor([block * SIZE + position % SIZE])
                    )
            if self.states is not None:
                self.states.layer(9)[0][request.blocks.state_slot] = value[0, 0]
        request.num_computed += work.num_tokens
        self.computed += work.num_tokens
        self.cache.publish(request, work.num_tokens)
        self.tables.trim(request)
        if draws:
            request.tokens.append(len(request.tokens) % 3)
            request.emitted += 1
            if request.is_full:
                self.scheduler.finish(request)

    def check_reads(self, request: Request) -> None:
        """Everything that the next token of a request sees is there and is its own."""
        for g, group in enumerate(self.kv.groups):
            first = 0 if group.window is None else max(0, request.num_computed - group.window + 1)
            for position in range(first, request.num_computed):
                block = request.tables[g][position // SIZE]
                for layer in group.layers:
                    for stored in self.kv.layer(layer):
                        assert float(stored[block, 0, position % SIZE, 0]) == content(
                            request, position
                        )
        if self.states is not None and request.num_computed:
            state = float(self.states.layer(9)[0][request.blocks.state_slot])
            assert state == content(request, request.num_computed - 1)

    def run(self, steps: int = 1000) -> None:
        while self.scheduler.has_work and steps:
            steps -= 1
            self.step()
            self.scheduler.check_integrity()
        assert steps, "it does not end"


def serve(stack: Stack, tokens: list[int], output: int = 1) -> int:
    """Run one request to its end; how many tokens of its prompt it found."""
    request = stack.add(tokens, output)
    stack.run()
    assert request.num_cached is not None
    return request.num_cached


PROMPT = list(range(100, 130))


# ------------------------------------------------------------------------------------------------------------- matches
@pytest.mark.parametrize("shapes", [FULL, MIXED, WINDOWED])
def test_the_second_request_finds_all_whole_blocks_of_the_first(
    shapes: dict[int, LayerShape],
) -> None:
    stack = Stack(shapes)
    assert serve(stack, PROMPT) == 0
    assert serve(stack, [*PROMPT, 1, 2, 3]) == 28
    assert serve(stack, [*PROMPT[:10], 1, 2, 3]) in (10, 8, 0)


def test_a_prompt_that_leaves_in_the_middle_of_a_block_copies_it() -> None:
    stack = Stack()
    serve(stack, PROMPT)
    before = [layer.clone() for layer in stack.kv.layer(0)]
    assert serve(stack, [*PROMPT[:10], 1, 2, 3]) == 10
    assert serve(stack, PROMPT[:28]) == 27, "one token is left to compute"
    published = [block for block in range(24) if stack.pool.is_idle(block)]
    assert len(published) == 8  # seven of the first prompt, one of the second
    first = [
        block for block in published if torch.equal(stack.kv.layer(0)[0][block], before[0][block])
    ]
    assert len(first) >= 7, "the original was written"


@pytest.mark.parametrize("shapes", [FULL, MIXED])
def test_without_room_for_a_copy_only_whole_blocks_are_taken(shapes: dict[int, LayerShape]) -> None:
    """The block to copy is the last one that is left: the copy's own place."""
    stack = Stack(shapes, num_blocks=3 * len(KvCache(shapes, 1, SIZE, torch.float32).groups))
    serve(stack, PROMPT[:12])
    assert serve(stack, [*PROMPT[:10], 1, 2]) == 8


def test_a_shared_block_is_one_block() -> None:
    stack = Stack(num_blocks=12, token_budget=64)
    serve(stack, PROMPT)
    requests = [stack.add([*PROMPT, i], output=2) for i in range(3)]
    stack.step()
    assert [request.num_cached for request in requests] == [28] * 3
    assert {request.tables[0][0] for request in requests} == {requests[0].tables[0][0]}
    assert stack.pool.num_free == 12 - 7 - 3
    stack.run()


def test_a_window_needs_only_what_it_sees() -> None:
    """Of a long prompt a windowed group holds no more than its window, and a match wants no more of it."""
    stack = Stack(WINDOWED, num_blocks=8, token_budget=8)
    long = list(range(200, 300))
    assert serve(stack, long, output=4) == 0
    assert serve(stack, [*long, 7]) == 100


def test_finished_answers_are_found_by_the_next_turn() -> None:
    stack = Stack()
    request = stack.add(PROMPT, output=8)
    stack.run()
    assert (
        serve(stack, [*request.tokens, 5, 6]) == 36
    )  # 37 of 38 tokens were computed, nine whole blocks


def test_the_least_recently_used_goes_first_and_beginnings_stay_longest() -> None:
    stack = Stack(num_blocks=10)
    old, new = list(range(10, 26)), list(range(30, 46))
    serve(stack, old)
    serve(stack, new)
    assert serve(stack, list(range(50, 66))) == 0
    assert serve(stack, [*new, 1]) >= 4
    assert stack.pool.evictions > 0


def test_recurrent_states_are_found_where_a_chunk_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "SNAPSHOT_DISTANCE", 2 * SIZE)
    stack = Stack(recurrent=True, token_budget=10)
    assert serve(stack, PROMPT) == 0
    assert serve(stack, [*PROMPT, 1]) == 28
    assert serve(stack, [*PROMPT[:17], 1]) == 16
    assert serve(stack, [*PROMPT[:15], 1]) == 8


def test_only_as_many_recurrent_snapshots_as_there_is_room_for() -> None:
    stack = Stack(recurrent=True, token_budget=4, num_blocks=60)
    for start in range(0, 500, 100):
        serve(stack, list(range(start, start + 20)))
    assert serve(stack, [*range(400, 420), 1]) == 20
    assert serve(stack, [*range(20), 1]) == 0


def test_a_prompt_in_small_chunks_drops_no_snapshots_of_others() -> None:
    stack = Stack(recurrent=True, token_budget=4, num_blocks=60)
    serve(stack, PROMPT)
    assert serve(stack, list(range(200, 290))) == 0
    assert serve(stack, [*PROMPT, 1]) == 28


def test_a_long_prompt_keeps_few_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "SNAPSHOT_DISTANCE", SIZE)
    monkeypatch.setattr(prefix_cache, "MAX_SNAPSHOTS", 2)
    stack = Stack(recurrent=True, token_budget=4, num_blocks=60)
    long = list(range(200, 290))
    serve(stack, long)
    nodes = stack.tree.nodes()
    assert sum(node.has_state for node in nodes) == 2
    assert serve(stack, [*long[:50], 1]) == 44


# ------------------------------------------------------------------------------------------------------------ property
def alphabet_prompts(rng: random.Random) -> list[int]:
    return [rng.randrange(2) for _ in range(rng.randint(1, 40))]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("shapes", [FULL, MIXED, WINDOWED], ids=["full", "mixed", "windowed"])
@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(40, 80),
    budget=st.integers(4, 40),
    tiers=st.sampled_from([(0, 0), (400, 0), (200, 400), (0, 300)]),
    recurrent=st.booleans(),
)
def test_whatever_happens_a_request_reads_its_own(
    shapes: dict[int, LayerShape],
    seed: int,
    num_blocks: int,
    budget: int,
    tiers: tuple[int, int],
    recurrent: bool,
) -> None:
    """Random prompts of two tokens share prefixes of every length, though not with what another adapter computed;
    arrivals, cancels, pauses, damaged copies."""
    rng = random.Random(seed)
    host, disk = tiers
    stack = Stack(
        shapes,
        num_blocks // (1 if len(shapes) == 3 else 2),
        {"host_bytes": host, "disk_bytes": disk} if host or disk else None,
        recurrent,
        token_budget=budget,
    )
    offload = stack.offload
    live: list[Request] = []
    reported: set[int] = set()
    for _ in range(40):
        if rng.random() < 0.5:
            live.append(
                stack.add(
                    alphabet_prompts(rng),
                    rng.randint(1, 9),
                    credit=rng.choice([1, 100]),
                    tenant=rng.choice("ab"),
                    adapter=rng.choice(ADAPTERS),
                )
            )
        live = [request for request in live if request.status is not Status.FINISHED]
        for request in live:
            if rng.random() < 0.1:
                request.credit += 20
            if rng.random() < 0.05:
                stack.scheduler.finish(request)
        if offload is not None and rng.random() < 0.2:
            damage(offload, rng)
        stack.step()
        stack.scheduler.check_integrity()
        check_reported(stack.tree, reported)
    for request in live:
        request.credit = 1000
    stack.run()
    assert not stack.scheduler.waiting
    assert stack.pool.num_free == stack.pool.num_blocks
    if offload is not None:
        assert (offload.host_bytes, offload.disk_bytes) <= tiers
        offload.close()


def check_reported(tree: PrefixTree, reported: set[int]) -> None:
    """Check that all changes together name the blocks that are held."""
    while tree.changes:
        block, held = tree.changes.popleft()
        assert (block in reported) != held, "nothing changed"
        reported ^= {block}
    here: set[int] = set()
    open_nodes: list[tuple[int, Node, tuple[int, ...]]] = [
        (root, top, ()) for root, top in tree._roots.items()
    ]
    while open_nodes:
        root, node, tokens = open_nodes.pop()
        open_nodes += [(root, child, tokens + child.tokens) for child in node.children.values()]
        if tokens and node.is_held:
            here.add(prefixes.chain(tokens, SIZE, root)[-1])
    assert reported == here


def damage(offload: Offload, rng: random.Random) -> None:
    """Flip a bit of some copy, in memory or in a file."""
    copies = [copy for tier in offload._tiers for copy in tier.values()]
    if copies:
        flip(rng.choice(copies).content)


def flip(content: torch.Tensor | Path) -> None:
    if isinstance(content, Path):
        data = bytearray(content.read_bytes())
        data[0] ^= 1
        content.write_bytes(data)
    else:
        content[0] ^= 1


# ------------------------------------------------------------------------------------------------------------- offload
def test_what_fell_out_comes_back_from_memory_and_from_disk() -> None:
    block = 2 * 2 * SIZE * 4  # two layers, key and value, SIZE slots, float32
    stack = Stack(num_blocks=9, tiers={"host_bytes": 3 * block, "disk_bytes": 20 * block})
    offload = stack.offload
    assert offload is not None
    serve(stack, PROMPT)
    serve(stack, list(range(500, 530)))
    assert offload.host_bytes == 3 * block
    assert offload.disk_bytes > 0
    assert serve(stack, PROMPT) == 28
    assert offload.loads >= 6
    assert offload.damaged == 0
    offload.close()


def test_a_damaged_copy_is_computed_again() -> None:
    stack = Stack(num_blocks=8, tiers={"host_bytes": 1 << 20})
    offload = stack.offload
    assert offload is not None
    serve(stack, PROMPT[:20])
    serve(stack, list(range(500, 530)))
    tokens = tuple(PROMPT[8:12])
    third = next(
        copy for key, copy in offload._tiers[0].items() if cast(Entry, key)[0].tokens == tokens
    )
    flip(third.content)
    assert serve(stack, PROMPT) == 8
    assert offload.damaged == 1


def test_what_is_cheaper_to_compute_than_to_copy_is_not_kept() -> None:
    tiers = {"host_bytes": 1 << 20, "recompute_seconds": lambda: 1e-12}
    stack = Stack(num_blocks=8, tiers=tiers)
    offload = stack.offload
    assert offload is not None
    serve(stack, PROMPT[:20])
    serve(stack, list(range(500, 530)))
    assert offload.host_bytes == 0


def test_a_full_disk_loses_the_copy_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dropped: list[Hashable] = []
    offload = Offload(16, 1 << 20, folder=tmp_path, on_drop=dropped.append)
    (folder,) = tmp_path.iterdir()
    offload.store("a", lambda: torch.ones(16, dtype=torch.uint8))
    folder.rename(tmp_path / "gone")
    offload.store("b", lambda: torch.ones(16, dtype=torch.uint8))
    assert dropped == ["a"]
    assert "a" not in offload
    assert offload.load("b") is not None
    assert "dropped" in caplog.text
    (tmp_path / "gone").rename(folder)
    offload.close()
    assert not list(tmp_path.iterdir())


def test_preempted_requests_find_what_they_computed() -> None:
    stack = Stack(num_blocks=10, token_budget=64)
    first, second = stack.add(PROMPT[:16], output=20), stack.add(PROMPT[16:], output=12)
    stack.run()
    assert first.preemptions + second.preemptions > 0
    assert stack.computed < 16 + 14 + 20 + 12 + 30, "a preempted request computed everything again"


def test_blocks_that_a_request_shares_with_its_victim_are_not_free_for_it() -> None:
    """What only the tiers have of its prompt must fit besides them."""
    stack = Stack(num_blocks=25, tiers={"host_bytes": 1 << 20}, token_budget=128)
    prefix, behind = list(range(100, 148)), list(range(200, 220))
    serve(stack, prefix + behind)
    serve(stack, list(range(500, 592)))
    paused = stack.add([*prefix, *range(300, 310)], output=9, credit=1)
    other = stack.add(list(range(400, 434)), output=6)
    stack.step()
    assert paused.out_of_credit
    assert stack.tables.num_free < 5
    request = stack.add([*prefix, *behind, 1, 2, 3])
    while not request.is_full:
        assert stack.arrivals == 5
        stack.step()
        stack.scheduler.check_integrity()
    assert other.is_full, "it had to wait for the other one's blocks"
    assert request.num_cached == len(prefix + behind)


class Counted(list[int]):
    """Tokens that count how many blocks of them are looked up."""

    lookups = 0

    def __getitem__(self, index: Any) -> Any:
        self.lookups += isinstance(index, slice)
        return super().__getitem__(index)


@pytest.mark.parametrize("shapes", [FULL, MIXED])
def test_what_a_request_shares_is_sought_no_further_than_in_tables(
    shapes: dict[int, LayerShape],
) -> None:
    """A request that waits for blocks asks in every step, and its cached prefix may be long."""
    stack = Stack(shapes, num_blocks=90, token_budget=64)
    long = list(range(100, 180))
    serve(stack, long)
    running = stack.add(long[:12], output=9)
    stack.step()
    assert running.num_cached == 11
    tokens = Counted([*long, 1])
    held = stack.cache.held(tokens)
    assert held == set(running.tables[0][:2])
    assert tokens.lookups == 3


def test_few_children_are_looked_at_for_a_match_inside_a_block() -> None:
    class Children(dict[tuple[int, ...], Node]):
        seen = 0

        def items(self) -> Any:
            for item in super().items():
                self.seen += 1
                yield item

    stack = Stack(num_blocks=60)
    for start in range(40):
        serve(stack, [start] * SIZE)
    root = stack.tree.root(prefixes.ROOT)
    root.children = children = Children(root.children)
    serve(stack, [100] * (SIZE + 1))
    assert 0 < children.seen < 40
