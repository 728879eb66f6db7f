"""LoRA adapters: what diffusers draws with them, whoever else is in the batch, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from motet_diffusion.engine.request import Lora, PictureRequest
from motet_shared.errors import BadRequest, ConfigError
from support.checkpoints.diffusion_checkpoints import FAMILIES, SIZE, load, write_adapter
from support.engine.recording_engine import RecordingEngine, assert_alike
from support.running.refusals import refuses

RED = PictureRequest(
    prompt="red circle", steps=3, seed=3, width=SIZE, height=SIZE, guidance_scale=3.0
)
# peft warns of several adapters in the reference, which are meant.
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")


def reference(path: Path, drawing: PictureRequest, files: dict[str, Path]) -> Any:
    """What diffusers itself draws with the adapters of a drawing."""
    pipeline = load(path)
    pipeline.set_progress_bar_config(disable=True)
    for lora in drawing.loras:
        file = files[lora.name]
        pipeline.load_lora_weights(
            str(file.parent), weight_name=file.name, adapter_name=lora.name, low_cpu_mem_usage=False
        )
    if drawing.loras:
        pipeline.set_adapters(
            [lora.name for lora in drawing.loras], [lora.scale for lora in drawing.loras]
        )
    images = pipeline(
        prompt=drawing.prompt,
        width=SIZE,
        height=SIZE,
        num_inference_steps=drawing.steps,
        guidance_scale=drawing.guidance_scale,
        generator=torch.Generator().manual_seed(drawing.seed),
        output_type="np",
    ).images
    return (images[0] * 255).round().astype(np.int64)


def with_loras(*loras: Lora) -> PictureRequest:
    return replace(RED, loras=loras)


def given(files: dict[str, Path]) -> Sequence[str]:
    return tuple(f"{name}={file}" for name, file in files.items())


@pytest.mark.long(after=1)
@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
def test_pictures_with_different_adapters_share_a_pass(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family](tmp_path / family / "model")
    files = {
        "ink": write_adapter(model, tmp_path / "ink.safetensors", 1),
        "oil": write_adapter(
            model, tmp_path / "oil.safetensors", 2, kohya=family in ("sd", "sdxl")
        ),
    }
    drawings = [
        with_loras(),
        with_loras(Lora("ink")),
        with_loras(Lora("oil", 0.5)),
        with_loras(Lora("oil", 0.7), Lora("ink", -0.4)),
    ]
    wanted = [reference(model, drawing, files) for drawing in drawings]
    assert min(np.abs(a - b).max() for i, a in enumerate(wanted) for b in wanted[:i]) > 5
    with RecordingEngine(model, loras=given(files)) as recording:
        for drawing, picture in zip(drawings, wanted, strict=True):
            (alone,) = recording.draw(drawing)
            assert_alike(alone, picture)
        passes = recording.engine.passes
        for drawn, picture in zip(recording.draw(*drawings), wanted, strict=True):
            assert_alike(drawn, picture)
        assert (
            recording.engine.passes - passes < len(drawings) * RED.steps
        )  # what each alone would take


@pytest.mark.parametrize(
    ("lora", "param"),
    [
        (Lora("oil"), "loras[0].name"),
        (Lora("ink", float("nan")), "loras[0].scale"),
        (Lora("ink", 11), "loras[0].scale"),
    ],
)
def test_adapters_that_cannot_be_had_are_named(tmp_path: Path, lora: Lora, param: str) -> None:
    model = FAMILIES["sd"](tmp_path / "model")
    ink = write_adapter(model, tmp_path / "ink.safetensors", 1)
    with RecordingEngine(model, loras=(f"ink={ink}",)) as recording:
        with refuses(BadRequest, param):
            recording.engine.add("x", with_loras(lora))
        with refuses(BadRequest, "loras[1].name"):
            recording.engine.add("x", with_loras(Lora("ink"), Lora("ink")))


def test_files_that_are_no_adapters_are_refused(tmp_path: Path) -> None:
    model = FAMILIES["sd"](tmp_path / "model")
    other = FAMILIES["flux"](tmp_path / "flux" / "model")
    alien = write_adapter(other, tmp_path / "alien.safetensors", 1)
    (tmp_path / "text.safetensors").write_text("no tensors")
    for setting in (
        "ink",
        f"ink={tmp_path / 'none'}",
        f"ink={alien}",
        f"ink={tmp_path / 'text.safetensors'}",
    ):
        with refuses(ConfigError, "loras"):
            RecordingEngine(model, loras=(setting,))
    pixart = FAMILIES["pixart"](tmp_path / "pixart" / "model")
    with refuses(ConfigError, "loras"):
        RecordingEngine(pixart, loras=(f"ink={alien}",))
