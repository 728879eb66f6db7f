"""Layers that see the beginning and what is recent: exact as the rule says, in memory that does not grow."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from motet_llm.attention.sink_window import rows_by_group
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_models.capacity import KvGroup, SinkWindow
from motet_shared.errors import ConfigError
from motet_shared.messages import Sampling
from support.engine.schedules import Job, Schedule, random_prompts
from support.families import language_families as families

TIE = 1e-4
SIZE = 4
RECENT = SinkWindow(first=4, last=8)
FAMILIES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV2ForCausalLM")


def is_seen(query: int, key: int) -> bool:
    """The rule, token by token."""
    return key <= query and (
        key < RECENT.first or key // SIZE >= query // SIZE - RECENT.last // SIZE
    )


@torch.inference_mode()
def expected_logits(reference: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """`[N, V]` of a forward pass of transformers with that rule as its mask; layers with a window keep theirs."""
    mask = masked(len(ids), is_seen)
    if "sliding_attention" not in (getattr(reference.config, "layer_types", None) or ()):
        return reference(torch.tensor([ids]), attention_mask=mask).logits[0]
    window = reference.config.sliding_window
    masks = {
        "full_attention": mask,
        "sliding_attention": masked(len(ids), lambda q, k: q - window < k <= q),
    }
    return reference(torch.tensor([ids]), attention_mask=masks).logits[0]


def masked(length: int, reads_images: Callable[[int, int], bool]) -> torch.Tensor:
    """What is added to scores `[1, 1, N, N]`."""
    seen = torch.tensor(
        [[reads_images(query, key) for key in range(length)] for query in range(length)]
    )
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


def check(reference: PreTrainedModel, job: Job) -> None:
    logits = expected_logits(reference, job.prompt + job.ids)[len(job.prompt) - 1 :]
    for row, token, logprob in zip(logits, job.ids, job.logprobs, strict=False):
        assert row.max() - row[token] < TIE
        assert logprob == pytest.approx(float(row.log_softmax(-1)[token]), abs=1e-4)
    if job.finish == "stop":
        eos = reference.generation_config.eos_token_id
        assert logits[-1].max() - logits[-1][eos[0] if isinstance(eos, list) else eos] < TIE
    else:
        assert len(job.ids) == job.sampling.max_tokens


def engine_of(folder: Path, **settings: Any) -> Engine:
    seen: dict[str, Any] = {"attention_window": RECENT.last, "attention_sinks": RECENT.first}
    small: dict[str, Any] = {
        "block_size": SIZE,
        "max_running": 4,
        "decode_slowdown": 0,
        "threads": 1,
    }
    return Engine(EngineConfig(model=str(folder), dtype="float32", **(small | seen | settings)))


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    torch.set_num_threads(1)
    folder = families.write_checkpoint(request.param, tmp_path_factory.mktemp("family"))
    model = families.class_of(request.param).from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return folder, model.eval()


@pytest.mark.long(after=3)
@pytest.mark.parametrize(
    "settings",
    [{"token_budget": 5}, {"token_budget": 64}, {"token_budget": 24, "speculate": "ngram"}],
)
def test_tokens_are_those_of_a_model_that_is_masked_so(
    family: tuple[Path, PreTrainedModel], settings: dict[str, Any]
) -> None:
    """However prompts are cut, cached, preempted, guessed and moved; and longer ones than the window."""
    folder, reference = family
    settings |= {"always_speculate": True}
    engines = [engine_of(folder, num_blocks=blocks, **settings) for blocks in (32, 48)]
    budget = engines[0].config.token_budget
    prompts = random_prompts(random.Random(budget), engines[0].card().vocab_size, 8)
    jobs = Schedule(engines, budget, prompts).run()
    assert (
        max(len(job.prompt) + len(job.ids) for job in jobs) > RECENT.first + RECENT.last + 2 * SIZE
    )
    for job in jobs:
        check(reference, job)


def test_a_long_stream_holds_few_blocks(family: tuple[Path, PreTrainedModel]) -> None:
    folder, reference = family
    engine = engine_of(folder, num_blocks=16, token_budget=4)
    job = Job(
        [1, 2, 3], Sampling(temperature=0, max_tokens=90, logprobs=0, ignore_eos=True), engine
    )
    engine.add(0, job.prompt, job.sampling)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            job.ids += output.ids
            job.logprobs += [entry.logprob for entry in output.logprobs or []]
            job.finish = output.finish
        engine.check_integrity()
    assert engine.stats()["preemptions"] == 0
    check(reference, job)


@given(
    starts=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=4),
    first=st.integers(0, 3),
    last=st.integers(1, 4),
)
def test_rows_list_what_their_queries_see(
    starts: list[tuple[int, int]], first: int, last: int
) -> None:
    group = KvGroup((0,), None, SinkWindow(first * SIZE, last * SIZE))
    spans = [(start, start + count) for start, count in starts]
    tables = np.array(
        [[100 * row + block for block in range(30)] for row in range(len(spans))], dtype=np.int32
    )
    (rows,) = rows_by_group([group], SIZE, [tables], spans)
    queries = [(row, position) for row, span in enumerate(spans) for position in range(*span)]
    bounds = rows.starts.tolist()
    assert bounds[-1] == len(queries)
    for index, (begin, end) in enumerate(pairwise(bounds)):
        length = int(rows.lengths_B[index])
        for step, (row, position) in enumerate(queries[begin:end]):
            keys = length - (end - begin) + step + 1  # what a causal kernel shows the query
            blocks = rows.tables_BM[index].tolist()
            shown = [(blocks[key // SIZE] - 100 * row) * SIZE + key % SIZE for key in range(keys)]
            block = position // SIZE
            due = [
                key
                for key in range(position + 1)
                if key // SIZE < first or key // SIZE >= block - last
            ]
            assert shown == due


@pytest.mark.parametrize(
    ("name", "value"), [("attention_window", 10), ("attention_sinks", 3), ("attention_sinks", -4)]
)
def test_halves_of_blocks_are_refused(tmp_path: Path, name: str, value: int) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings: dict[str, Any] = {"attention_window": 8, "attention_sinks": 4} | {name: value}
    with pytest.raises(ConfigError) as raised:
        EngineConfig(model=str(tmp_path), block_size=SIZE, **settings)
    assert raised.value.param == name
