"""What `motet up` starts for a model that sees, and what shared code knows of it from its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from motet_cli.checkpoints.model_folders import ModelFolder
from motet_cli.supervision.stack import Stack
from motet_models.image_support import accepts_audio, accepts_images, placeholders


def folder(path: Path, **config: Any) -> ModelFolder:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return ModelFolder(path.name, path)


def test_every_model_that_sees_has_eyes(tmp_path: Path) -> None:
    models = (
        folder(tmp_path / "blind", model_type="llama"),
        folder(tmp_path / "one", model_type="llava", image_token_index=5),
        folder(tmp_path / "two", model_type="qwen3_vl", image_token_id=7),
    )
    specs = Stack(models=models, nats_url="nats://127.0.0.1:1").services()
    encoder = [spec for spec in specs if spec.role == "encoder"]
    assert [(spec.name, spec.model) for spec in encoder] == [
        ("encoder-1", "one"),
        ("encoder-2", "two"),
    ]
    assert all(
        "motet_encoder" in spec.argv and str(tmp_path / str(spec.model)) in spec.argv
        for spec in encoder
    )
    assert sum(spec.role == "decode" for spec in specs) == 3


def test_a_stack_without_such_models_has_none(tmp_path: Path) -> None:
    specs = Stack(models=(folder(tmp_path / "m", model_type="llama"),), nats_url="").services()
    assert not [spec for spec in specs if spec.role == "encoder"]


def test_what_hears() -> None:
    assert accepts_audio({"model_type": "qwen2_audio", "audio_token_index": 5})
    assert accepts_audio(
        {"model_type": "granite_speech", "audio_token_index": 5, "has_lora_adapter": False}
    )
    assert not accepts_audio({"model_type": "granite_speech", "audio_token_index": 5})
    assert not accepts_audio({"model_type": "qwen2_audio"})
    assert not accepts_images({"model_type": "qwen2_audio", "audio_token_index": 5})


@pytest.mark.parametrize(
    ("config", "token"),
    [
        ({"model_type": "llava", "image_token_index": 32000}, 32000),
        ({"model_type": "smolvlm", "image_token_id": 49190}, 49190),
        ({"model_type": "gemma3", "image_token_index": 262144}, 262144),
        ({"model_type": "mllama", "image_token_index": 128256}, None),
        ({"model_type": "llava"}, None),
        ({}, None),
    ],
)
def test_what_sees(config: dict[str, Any], token: int | None) -> None:
    assert accepts_images(config) is (token is not None)
    if token is not None:
        assert placeholders(config) == {"image": token}
