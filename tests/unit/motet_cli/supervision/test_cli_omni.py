"""An omni model gets a process for each stage of its checkpoint; its thinker alone is a language model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from motet_cli.checkpoints.model_folders import ModelFolder
from motet_cli.supervision.stack import Stack

THINKER = {
    "model_type": "qwen2_5_omni_thinker",
    "image_token_index": 5,
    "audio_token_index": 6,
}


def specs(folder: Path, config: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    (folder / "config.json").write_text(json.dumps(config))
    stack = Stack(models=(ModelFolder("m", folder),), nats_url="", vad=0)
    return {spec.name: tuple(spec.argv) for spec in stack.services()}


@pytest.mark.parametrize("kind", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_each_stage_is_a_process(tmp_path: Path, kind: str) -> None:
    config = {"model_type": kind, "thinker_config": THINKER}
    found = specs(tmp_path, config)
    assert found.keys() == {"gateway", "tokenizer", "decode", "encoder", "talker", "code2wav"}
    talker, code2wav = " ".join(found["talker"]), " ".join(found["code2wav"])
    assert "--stage talker" in talker
    assert "--name m-talker" in talker
    assert "--name m --language-model m-talker" in code2wav
    assert "talker" not in " ".join(found["gateway"])  # it is ready without


def test_a_model_without_speech_has_no_talker(tmp_path: Path) -> None:
    silent = {
        "model_type": "qwen2_5_omni",
        "thinker_config": THINKER,
        "enable_audio_output": False,
    }
    for config in (silent, THINKER):
        assert specs(tmp_path, config).keys() == {"gateway", "tokenizer", "decode", "encoder"}
