"""Decode steps as CUDA graphs say what steps say whose kernels are launched one by one.

Without a GPU their kernels are recorded, and replayed on the same memory (`support.engine.recorded_graphs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from motet_llm.config import EngineConfig
from motet_llm.engine import model_runner
from motet_llm.engine.engine import Engine
from motet_models import graph_sizes
from motet_shared.messages import Sampling
from support.engine.recorded_graphs import RecordedGraphs
from support.families import language_families as families
from support.running.triton_modes import without_triton

PROMPTS = ([5, 6, 7], [11, 3], [9, 8, 4, 2, 1], [(7 * i + 3) % 50 for i in range(11)])
GREEDY = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}
DRAWN = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 4, "ignore_eos": True}
Answers = list[list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def captured(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraphs]:
    """What captures the steps of each model, without a GPU; tables are of 16 or 64 tokens."""
    monkeypatch.setattr(graph_sizes, "TOKENS", (16, 64))
    made: list[RecordedGraphs] = []

    def graphs_on(where: torch.device) -> RecordedGraphs:
        made.append(RecordedGraphs(where))
        return made[-1]

    if device.type == "cpu":
        monkeypatch.setattr(model_runner, "graphs_on", graphs_on)
    return made


def engine_of(folder: Path, device: torch.device, **settings: Any) -> Engine:
    sizes = {"num_blocks": 32, "block_size": 8, "max_running": 4, "token_budget": 32, "context": 64}
    given = {"threads": 1, "dtype": "float32", "prefix_cache": False, "decode_slowdown": 0.0}
    config = EngineConfig(
        model=str(folder), device=str(device), cuda_graphs=True, **{**sizes, **given, **settings}
    )
    return Engine(config)


def said(
    engine: Engine,
    prompts: Sequence[list[int]] = PROMPTS,
    options: Sequence[dict[str, Any]] = (GREEDY,),
    tokens: Sequence[int] = (6, 2, 4, 3),
    apart: int = 2,
    **more: Any,
) -> Answers:
    """Return tokens and log-probabilities of requests that arrive so many steps `apart`."""
    answers: Answers = [[] for _ in prompts]
    arrived = steps = 0
    while engine.has_work or arrived < len(prompts):
        while arrived < len(prompts) and steps >= arrived * apart:
            sampling = Sampling(
                **options[arrived % len(options)], max_tokens=tokens[arrived % len(tokens)]
            )
            engine.add(arrived, prompts[arrived], sampling, **more)
            arrived += 1
        for output in engine.step():
            assert output.error is None
            assert isinstance(output.key, int)
            chances = [entry.logprob for entry in output.logprobs or []] or [0.0] * len(output.ids)
            answers[output.key] += zip(output.ids, chances, strict=True)
        steps += 1
    engine.check_integrity()
    return answers


def launched(engine: Engine) -> Engine:
    """Return an engine on the same model that launches kernels one by one, with an empty cache."""
    runner = engine.runner
    runner.resize(runner.kv.num_blocks // len(runner.kv.groups))
    runner.graphs = None
    return Engine(engine.config, runner)


def same(one: Answers, other: Answers) -> None:
    """Tokens are the same; numbers nearly, since products of more rows may be summed in another order."""
    assert [[token for token, _ in answer] for answer in one] == [
        [token for token, _ in answer] for answer in other
    ]
    numbers = [torch.tensor([c for a in answers for _, c in a]) for answers in (one, other)]
    torch.testing.assert_close(*numbers, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("LlamaForCausalLM", {}),
        ("Qwen3ForCausalLM", {"weights": "int8", "kv_dtype": "int8"}),
        ("Gemma2ForCausalLM", {}),  # a window: two groups of layers, each with tables of its own
        ("DeepseekV3ForCausalLM", {}),  # latents, and experts that may be chosen on the host
        ("GptOssForCausalLM", {}),  # sinks
    ],
)
@pytest.mark.timeout(600)
def test_replayed_steps_say_what_launched_steps_say(
    device: torch.device, tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    folder = families.write_checkpoint(name, tmp_path)
    engine = engine_of(folder, device, max_running=2, **settings)
    about, stats = engine.runner.describe()["cuda_graphs"], engine.stats()
    answers = said(engine, PROMPTS[2:], (GREEDY, DRAWN))
    assert engine.stats()["graph_steps"] > 0 or about.startswith("off: ")
    if name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM"):
        assert (about, stats["graphs"]) == ("on", 4)
    same(answers, said(launched(engine), PROMPTS[2:], (GREEDY, DRAWN)))
    engine.close()


@pytest.mark.timeout(600)
def test_every_size_replays_new_inputs(
    device: torch.device, tmp_path: Path, captured: list[RecordedGraphs]
) -> None:
    """One to three rows, in short and in long tables, of which each step has other tokens and blocks."""
    engine = engine_of(families.write_checkpoint("LlamaForCausalLM", tmp_path), device)
    long = [[(5 * i + k) % 50 for i in range(17 + k)] for k in range(4)]
    runs = [prompts[:count] for prompts in (PROMPTS, long) for count in (1, 2, 3)]
    answers = [said(engine, prompts, tokens=(3,), apart=0) for prompts in runs]
    for graphs in captured[:1]:
        assert len(graphs.graphs) == 6
        assert all(graph.replays for graph in graphs.graphs)
    plain = launched(engine)
    for prompts, answer in zip(runs, answers, strict=True):
        same(answer, said(plain, prompts, tokens=(3,), apart=0))
    engine.close()


@pytest.mark.timeout(600)
def test_rows_that_are_not_needed_touch_no_block(device: torch.device, tmp_path: Path) -> None:
    """Three requests in a graph of four rows leave in the cache what launched steps leave there."""
    folder = families.write_checkpoint("Gemma2ForCausalLM", tmp_path)
    engine = engine_of(folder, device)
    assert all(not storage.any() for storage in storages(engine))  # by captures
    said(engine, PROMPTS[:3], tokens=(6,))
    replayed = [storage.clone() for storage in storages(engine)]
    assert all(not storage[-1].any() for storage in replayed)  # the null block
    plain = launched(engine)
    said(plain, PROMPTS[:3], tokens=(6,))
    for one, other in zip(replayed, storages(plain), strict=True):
        assert torch.equal(one.any(1), other.any(1))  # the same blocks are written
        numbers = [storage.view(torch.float32) for storage in (one, other)]
        torch.testing.assert_close(*numbers, rtol=1e-4, atol=1e-4)
    engine.close()


def storages(engine: Engine) -> list[torch.Tensor]:
    kv = engine.runner.kv
    return [kv.rows(layer) for layer in kv.groups[0].layers]


@pytest.mark.timeout(600)
def test_a_step_that_no_graph_holds_is_launched(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_sizes, "MOST_KEYS", 32)  # two rows of 16 tokens
    engine = engine_of(families.write_checkpoint("LlamaForCausalLM", tmp_path), device)
    assert engine.stats()["graphs"] == 2
    answers = said(engine, apart=0)
    assert 0 < engine.stats()["graph_steps"] < engine.stats()["decode_steps"]
    same(answers, said(launched(engine), apart=0))
    engine.close()


@pytest.mark.timeout(600)
def test_drafts_are_launched(device: torch.device, tmp_path: Path) -> None:
    folder = families.write_checkpoint("LlamaForCausalLM", tmp_path)
    settings = {"speculate": "ngram", "draft_tokens": 2, "always_speculate": True}
    engine = engine_of(folder, device, **settings)
    repeating = [{**GREEDY, "logit_bias": {1: 100.0}}]
    answers = said(engine, PROMPTS[:1], repeating, tokens=(9,))
    assert engine.stats()["drafted_tokens"] > 0
    assert 0 < engine.stats()["graph_steps"] < engine.stats()["decode_steps"]
    same(answers, said(launched(engine), PROMPTS[:1], repeating, tokens=(9,)))
    engine.close()


@pytest.mark.timeout(600)
def test_adapters_are_launched(device: torch.device, tmp_path: Path) -> None:
    lora_folders = pytest.importorskip("support.checkpoints.lora_folders", reason="peft is absent")
    folder = families.write_checkpoint("LlamaForCausalLM", tmp_path / "model")
    model = families.class_of("LlamaForCausalLM").from_pretrained(folder, dtype=torch.float32)
    given = (
        f"one={lora_folders.make_adapter(model, tmp_path / 'one', target_modules=['k_proj', 'up_proj'])}",
    )
    engine = engine_of(folder, device, adapters=given)
    bank = engine.runner.adapters
    assert bank is not None
    adapter = bank.load("one", 0)
    answers = said(engine, PROMPTS[:1], adapter=adapter)
    assert engine.stats()["graph_steps"] == 0
    said(engine, PROMPTS[:1])
    assert engine.stats()["graph_steps"] > 0
    same(answers, said(launched(engine), PROMPTS[:1], adapter=adapter))
    engine.close()


@pytest.mark.timeout(600)
def test_recurrent_layers_are_launched(device: torch.device, tmp_path: Path) -> None:
    engine = engine_of(families.write_checkpoint("Qwen3NextForCausalLM", tmp_path), device)
    assert engine.runner.describe()["cuda_graphs"].startswith("off: recurrent")
    assert said(engine, PROMPTS[:1], tokens=(2,))
    engine.close()


@pytest.mark.timeout(600)
def test_a_model_on_its_twins_is_launched(device: torch.device, tmp_path: Path) -> None:
    """Twins read lengths and slots on the host."""
    folder = families.write_checkpoint("LlamaForCausalLM", tmp_path)
    engine = engine_of(folder, device)
    with without_triton():
        engine.runner.resize(32)
        engine.runner.capture_graphs()
        assert engine.runner.describe()["cuda_graphs"].startswith("off: ")
        assert said(Engine(engine.config, engine.runner), PROMPTS[:1], tokens=(2,))
    engine.close()
