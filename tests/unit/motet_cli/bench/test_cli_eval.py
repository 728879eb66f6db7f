"""Test `motet eval`: its options, its table, and a run on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from motet_cli.commands.eval import UNCHANGED, Setting, parse_setting, table
from motet_cli.main import main
from motet_models.capacity import format_bytes
from motet_shared.errors import ConfigError
from support.checkpoints.language_checkpoints import tiny_checkpoint


def test_a_setting_can_name_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    plain, other = Path("plain"), tmp_path.resolve()
    text = f"weights=int8,model={tmp_path},kv_dtype=int8"
    assert parse_setting(text, plain) == Setting(text, other, ("weights=int8", "kv_dtype=int8"))
    assert parse_setting("weights=int4", plain) == Setting("weights=int4", plain, ("weights=int4",))


@pytest.mark.parametrize("text", ["int8", "weights=", "=int8", "weights=int8,"])
def test_malformed_settings_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_setting(text, Path())
    assert caught.value.param == "--setting"


def test_the_table_shows_differences() -> None:
    chosen = {"weights": "float32", "kv_dtype": "float32"}
    first: dict[str, Any] = {
        "setting": UNCHANGED,
        "chosen": chosen,
        "weight_bytes": 4 << 20,
        "kv_bytes_per_token": 512,
    }
    first |= {
        "perplexity": 2.0,
        "perplexity_of": "texts",
        "accuracy": 0.9,
        "accuracy_by_category": {"count": 0.9, "size": 0.9},
    }
    second = first | {
        "setting": "weights=int4",
        "weight_bytes": 1 << 20,
        "perplexity": 2.5,
        "accuracy": 0.85,
    }
    second["accuracy_by_category"] = {"count": 0.8, "size": 0.9}
    second |= {"drafted_tokens": 1600, "accepted_tokens": 1200}
    console = Console(width=200, record=True)
    console.print(table([first, second]))
    shown = console.export_text()
    assert "perplexity +25.0%, count -10.0 points, 75% of 1,600 draft tokens accepted" in shown
    assert "85.0%" in shown
    assert format_bytes(4 << 20) in shown


@pytest.mark.long
@pytest.mark.timeout(300)
def test_settings_are_evaluated_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model")
    tasks, text = tmp_path / "tasks.jsonl", tmp_path / "text.txt"
    tasks.write_text(json.dumps({"question": "a?", "answer": "b", "category": "letters"}) + "\n")
    text.write_text("one two three " * 10)
    given = ["eval", str(folder), "--tasks", str(tasks), "--text", str(text), "--json"]
    assert main([*given, "--setting", "weights=int8,kv_dtype=int8,num_blocks=16"]) == 0
    first, second = json.loads(capsys.readouterr().out)["settings"]
    assert first["setting"] == UNCHANGED
    assert second["chosen"]["weights"] == second["chosen"]["kv_dtype"] == "int8"
    assert second["weight_bytes"] < first["weight_bytes"]
    assert second["kv_bytes_per_token"] < first["kv_bytes_per_token"]
    assert 1 < first["perplexity"] != second["perplexity"]
    assert first["accuracy_by_category"] == {"letters": 0.0}


def test_wrong_options_are_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model")
    assert main(["eval", str(folder)]) == 2
    assert "--text, --tasks" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(["eval", str(folder), "--tasks", "nowhere.jsonl"]) == 2
    assert "--tasks: 'nowhere.jsonl'" in capsys.readouterr().err
