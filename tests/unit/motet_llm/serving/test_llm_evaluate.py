"""Perplexity and accuracy of a setting: against transformers, and what bad texts, tasks and settings are told."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from motet_evaluation.evaluate import answers, engine_config, evaluate, limited
from motet_evaluation.scoring import STEP, log_probabilities
from motet_evaluation.tasks import Task, read_tasks
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_shared.errors import ConfigError
from support.checkpoints.language_checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("evaluate") / "llama")


def args(folder: Path, **given: Any) -> argparse.Namespace:
    defaults: dict[str, Any] = {
        "model": str(folder),
        "setting": ["threads=1", "num_blocks=64"],
        "text": [],
    }
    return argparse.Namespace(**{**defaults, "tasks": None, "limit": 0, "window": 64, **given})


def test_log_probabilities_are_transformers_own(folder: Path) -> None:
    tokens = [(11 * i + i * i) % 250 for i in range(STEP + 40)]
    engine = Engine(
        EngineConfig(
            model=str(folder), threads=1, num_blocks=8, weights="float32", kv_dtype="float32"
        )
    )
    found = torch.tensor(log_probabilities(engine.runner, tokens))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        due = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    due = due.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found, due, rtol=1e-3, atol=1e-3)
    assert log_probabilities(engine.runner, tokens[:1]) == []
    for bad, number in (([1] * 513, "513"), ([1, 900], "900")):
        with pytest.raises(ConfigError, match=number) as caught:
            log_probabilities(engine.runner, bad)
        assert caught.value.param == "tokens"


def test_texts_are_read_in_windows(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A red circle is left of a blue square. " * 5)
    found = evaluate(args(folder, text=[text]))
    ids = AutoTokenizer.from_pretrained(folder).encode(text.read_text(), add_special_tokens=False)
    assert found["tokens"] == len(ids) - math.ceil(len(ids) / 64)
    assert found["perplexity"] > 1
    assert "accuracy" not in found
    assert found["weight_bytes"] > 0
    assert (
        found["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    )  # layers, keys and values, heads, numbers, bytes


def test_a_right_answer_counts(folder: Path, tmp_path: Path) -> None:
    """What the model says is first found out, then asked again as the right answer."""
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"question": "What?", "answer": "nothing", "category": "a"}) + "\n")
    wrong = evaluate(args(folder, tasks=path))
    assert wrong["accuracy"] == 0
    engine = Engine(engine_config(str(folder), ["threads=1", "num_blocks=64"]))
    said = answers(engine, AutoTokenizer.from_pretrained(folder), read_tasks(path))[0]
    lines = [
        {"question": "What?", "answer": said, "category": "a"},
        {"question": "Who?", "answer": "x"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = evaluate(args(folder, tasks=path))
    assert found["accuracy_by_category"] == {"a": 1.0, "all": 0.0}
    assert (found["accuracy"], found["questions"], found["perplexity_of"]) == (0.5, 2, "answers")


def test_tool_calls_are_compared_as_json() -> None:
    task = Task(
        messages=(),
        answer='<tool_call>\n{"name": "draw", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    )
    assert task.is_right('<tool_call>{"arguments": {"b": 2, "a": 1}, "name": "draw"}</tool_call>')
    assert not task.is_right(
        '<tool_call>{"arguments": {"b": 3, "a": 1}, "name": "draw"}</tool_call>'
    )
    assert not task.is_right("<tool_call>{</tool_call>")
    assert not task.is_right("draw")


def test_the_first_of_each_category_are_kept() -> None:
    tasks = [Task(messages=(), answer=str(i), category="ab"[i % 2]) for i in range(6)]
    assert [task.answer for task in limited(tasks, 2)] == ["0", "1", "2", "3"]
    assert limited(tasks, 0) == tasks


@pytest.mark.parametrize(
    ("line", "param"),
    [
        ("{", "--tasks"),
        ('{"question": "a"}', "answer"),
        ('{"answer": "a", "messages": ["b"]}', "messages"),
        ('{"answer": "a", "question": "b", "category": 3}', "category"),
    ],
)
def test_malformed_tasks_are_rejected(line: str, param: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"tasks\.jsonl:2") as caught:
        read_tasks(path)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("wheels=4", "wheels=4"),
        ("threads=many", "threads='many'"),
        ("overlap=yes", "overlap='yes'"),
        ("weights=int3", "weights='int3'"),
    ],
)
def test_wrong_settings_are_rejected(setting: str, value: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=value):
        engine_config(str(folder), [setting])


def test_there_must_be_something_to_read(folder: Path, tmp_path: Path) -> None:
    for options in ({}, {"text": [tmp_path / "none.txt"]}):
        with pytest.raises(ConfigError) as caught:
            evaluate(args(folder, **options))
        assert caught.value.param == "--text"
