"""A prompt that another engine computes gives the tokens that it gives here, whatever happens on the way.

Two engines without a wire between them; a seeded random schedule carries what they say from one to the other, late, in
other company, broken off or damaged. In deterministic mode not a bit of a log-probability may differ.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_llm.cache.kv_cache import KvCache, LayerShape
from motet_llm.config import EngineConfig
from motet_llm.disaggregation.kv_transfer import (
    DTYPES,
    TransferRange,
    pack,
    plan_parts,
    unpack,
)
from motet_llm.engine.engine import Engine
from motet_shared.errors import BadRequest
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.engine.handovers import Elsewhere, Job, Pair, alone, prompts_of
from support.families import language_families as families


def make_engine(folder: Path, placement: Elsewhere | None = None, **options: Any) -> Engine:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "threads": 1,
        "block_size": 4,
        "num_blocks": 160,
        "token_budget": 16,
        "max_running": 8,
        "context": 160,
        "decode_slowdown": 0,  # it goes by the clock, and this must come out the same every time
        "overlap": False,
    }
    config = EngineConfig(model=str(folder), **(defaults | options))
    return Engine(config, placement=placement)


def check(
    folder: Path, seed: int, faults: float, tokens: int = 4000, answer: int = 12, **options: Any
) -> tuple[Engine, Engine, list[Job]]:
    """Both sides in deterministic mode, with other blocks, pools and chunks; the tokens are those of one engine."""
    rng = random.Random(seed)
    common = {"deterministic": True} | options
    sizes = [rng.choice([1, 4, 16]) for _ in range(2)]
    here, there = (
        make_engine(
            folder,
            placement,
            block_size=size,
            num_blocks=tokens // size,
            token_budget=rng.choice([8, 11, 64]),
            **common,
        )
        for size, placement in zip(sizes, (Elsewhere(1), None), strict=True)
    )
    there.sender.part_bytes = rng.choice([64, 3000, 1 << 20])
    assert here.card().kv_format == there.card().kv_format != ""
    prompts = prompts_of(rng, here.card().vocab_size)
    due = alone(make_engine(folder, **common), prompts, answer)
    found = Pair(here, there, seed, faults).run(prompts, answer)
    for one, other in zip(found, due, strict=True):
        assert (one.ids, one.logprobs, one.finish) == (other.ids, other.logprobs, other.finish)
    return here, there, found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


KINDS = [  # grouped heads; windows everywhere; windows and full layers mixed; latents; chunks
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Gemma3ForCausalLM",
    "MiniCPM3ForCausalLM",
    "Llama4ForCausalLM",
]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return families.write_checkpoint(request.param, tmp_path_factory.mktemp("kind"))


@pytest.mark.extended("families", after=4)
@pytest.mark.long(after=2)
@pytest.mark.parametrize("faults", [0.0, 0.1])
def test_a_prompt_computed_elsewhere_gives_the_same_tokens(kind: Path, faults: float) -> None:
    here, there, jobs = check(kind, 1, faults)
    assert here.stats()["remote_prefills"] >= len(jobs) - 2
    assert there.stats()["kv_bytes_sent"] >= here.stats()["kv_bytes_received"] > 0
    assert bool(here.receiver.fallbacks) == bool(faults)


@pytest.mark.parametrize(("seed", "kv_dtype"), [(2, "float32"), (3, "bfloat16")])
def test_so_it_does_where_blocks_are_short_and_others_give_way(
    llama: Path, seed: int, kv_dtype: str
) -> None:
    here, _, _ = check(llama, seed, 0.05, tokens=112, answer=40, kv_dtype=kv_dtype)
    assert here.stats()["preemptions"] > 0


def test_what_goes_wrong_is_told_apart(llama: Path) -> None:
    """A part that is not what is due ends the transfer, and what came before it is kept."""
    here, there = make_engine(llama, Elsewhere(1)), make_engine(llama)
    prompt = list(range(40))
    (due,) = alone(make_engine(llama), [prompt])
    pair = Pair(here, there, seed=0)
    here.add(0, prompt, Sampling(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0))
    pair.jobs[0] = Job(prompt)
    pair._step_here()
    while len(pair.wire) < 2:
        pair._step_there()
    (_, first), (_, second) = list(pair.wire)[:2]
    here.receiver.receive(0, first.part, first.content, first.dtype)
    here.receiver.receive(
        0, replace(second.part, start=first.part.stop + 1), second.content, second.dtype
    )
    here.receiver.receive(
        0, second.part, second.content, second.dtype
    )  # too late: it is computed here
    while not pair.jobs[0].finish:
        pair._step_here()
        here.check_integrity()
    assert pair.jobs[0].ids == due.ids
    assert here.receiver.fallbacks == {"damaged": 1}
    assert here.stats()["kv_parts_received"] == 1
    assert here.stats()["tokens"] == len(prompt) - first.part.stop + 11
    assert set(pair.jobs[0].timing) == {"queue", "prefill", "decode", "model", "transfer"}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"dtype": "float64"}, "float64"),
        ({"content": torch.zeros(8, dtype=torch.uint8)}, "8 bytes"),
        ({"layers": (7,)}, "layer 7"),
        ({"first": 3}, "layer 0"),
        ({"end": 900}, "900"),
        ({"stop": 900}, "900"),
    ],
)
def test_a_part_that_is_wrong_stores_nothing(
    llama: Path, change: dict[str, Any], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = make_engine(llama, Elsewhere(1)), make_engine(llama)
    pair = Pair(here, there, seed=0)
    here.add(0, list(range(40)), Sampling(max_tokens=1))
    pair._step_here()
    while not pair.wire:
        pair._step_there()
    (_, packed) = pair.wire[0]
    fields = {name: value for name, value in change.items() if name not in ("dtype", "content")}
    content, dtype = change.get("content", packed.content), change.get("dtype", packed.dtype)
    here.receiver.receive(0, replace(packed.part, **fields), content, dtype)
    assert complaint in str(getattr(caplog.records[-1], "reason", ""))
    assert here.receiver.fallbacks == {"damaged": 1}
    here.check_integrity()
    assert [o.handover.instance for o in here.step() if o.handover] == [""]
    assert here.stats()["kv_parts_received"] == 0


def test_nothing_spins_while_all_wait_for_what_is_on_its_way(llama: Path) -> None:
    """A pool full of what is on its way, and an arrival that does not fit: nothing to do, until something comes."""
    engine = make_engine(llama, Elsewhere(), num_blocks=12, block_size=4)
    for key in (0, 1):
        engine.add(key, list(range(40)), Sampling(max_tokens=4, temperature=0, ignore_eos=True))
    (output,) = engine.step()
    assert output.handover is not None
    assert not engine.has_work
    engine.check_integrity()
    engine.receiver.end(0, "late")
    assert engine.has_work
    while engine.has_work:
        for output in engine.step():
            if output.handover is not None:
                engine.receiver.end(output.key, "late")
        engine.check_integrity()
    assert engine.receiver.fallbacks == {"late": 2}
    assert engine.stats()["blocks_free"] == 12


def test_kinds_of_caches_are_told_apart(llama: Path, tmp_path: Path) -> None:
    def kind(folder: Path = llama, **options: Any) -> str:
        return make_engine(folder, **options).card().kv_format

    narrow = tiny_checkpoint("llama", tmp_path / "narrow", num_key_value_heads=1)
    mistral = tiny_checkpoint("mistral", tmp_path / "mistral")
    plain = kind()
    assert plain == kind(block_size=16) == kind(kv_dtype="bfloat16")
    assert (
        len({plain, kind(narrow), kind(mistral), kind(weights="int8"), kind(deterministic=True)})
        == 5
    )
    assert kind(deterministic=True) != kind(deterministic=True, kv_dtype="bfloat16")


def test_a_state_does_not_travel(tmp_path: Path) -> None:
    """Of a model with recurrent layers nobody gets the half that is in the cache."""
    engine = make_engine(families.write_checkpoint("Qwen3NextForCausalLM", tmp_path))
    assert engine.card().kv_format == ""


@given(
    start=st.integers(0, 40),
    count=st.integers(1, 40),
    window=st.sampled_from([None, 2, 9]),
    most=st.integers(1, 4000),
)
@settings(max_examples=40)
def test_parts_bring_all_that_is_seen(
    start: int, count: int, window: int | None, most: int
) -> None:
    """From blocks of 4 in float32 into blocks of 3 in bfloat16: every token that a window still sees, and no other."""
    shapes = {0: LayerShape(2, 3, 5), 1: LayerShape(1, 4, 0), 2: LayerShape(2, 2, 2, window)}
    stop = start + count
    ours, theirs = KvCache(shapes, 90, 4, torch.float32), KvCache(shapes, 120, 3, torch.bfloat16)
    for layer in shapes:
        for tensor in ours.layer(layer):
            tensor.copy_(torch.randn(tensor.shape))
    source, target = (_tables(kv, stop) for kv in (ours, theirs))
    coming = TransferRange(theirs, start, stop)
    parts = plan_parts(ours, start, stop, most)
    for part in parts:
        coming.add(part)
        unpack(theirs, target, part, pack(ours, source, part), DTYPES["float32"])
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    for layer, shape in shapes.items():
        first = start if shape.window is None else max(start, stop - shape.window + 1)
        for mine, other in zip(ours.layer(layer), theirs.layer(layer), strict=True):
            sent, got = (
                _rows(ours, source, layer, mine, stop),
                _rows(theirs, target, layer, other, stop),
            )
            assert torch.equal(got[first:stop], sent[first:stop].to(torch.bfloat16))
            assert not got[:first].any()


def _tables(kv: KvCache, tokens: int) -> list[list[int]]:
    """Blocks in a random order, others for each group."""
    blocks = random.Random(tokens).sample(range(kv.num_blocks), kv.num_blocks)
    length = -(-tokens // kv.block_size)
    return [blocks[g * length : (g + 1) * length] for g in range(len(kv.groups))]


def _rows(
    kv: KvCache, tables: Sequence[Sequence[int]], layer: int, cache: torch.Tensor, tokens: int
) -> torch.Tensor:
    """Tokens `[N, K, D]` of a layer."""
    table = tables[kv.group_of[layer]]
    return torch.stack(
        [cache[table[n // kv.block_size], :, n % kv.block_size] for n in range(tokens)]
    )


def test_a_layer_of_chunks_sends_nothing_of_one_that_has_ended() -> None:
    """Token 8 begins a chunk, and attends to none of the tokens before it."""
    kv = KvCache({0: LayerShape(1, 2, 2), 1: LayerShape(1, 2, 2, chunk=8)}, 8, 4, torch.float32)
    for stop, layers in ((6, {0, 1}), (8, {0}), (10, {0, 1})):
        coming = TransferRange(kv, 4, stop)
        parts = plan_parts(kv, 4, stop, 1 << 20)
        for part in parts:
            coming.add(part)
        assert {layer for part in parts for layer in part.layers} == layers
        assert parts[-1].last


def test_a_range_must_be_whole() -> None:
    kv = KvCache({0: LayerShape(1, 2, 2), 1: LayerShape(1, 2, 2)}, 8, 4, torch.float32)
    first, second = plan_parts(kv, 0, 8, 8 * 16)
    with pytest.raises(BadRequest):
        TransferRange(kv, 0, 8).add(replace(first, last=True))
    with pytest.raises(BadRequest):
        TransferRange(kv, 0, 8).add(replace(second, first=1))
    coming = TransferRange(kv, 0, 8)
    coming.add(first)
    coming.add(second)
