"""Denoisers in int8, fp8 and GGUF codes: what diffusers draws with the same weights dequantized."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from motet_diffusion.engine.request import Lora, PictureRequest
from motet_diffusion.pipeline.quantized import QuantizedLinear
from motet_kernels.linear.group_weights import quantize_float8
from motet_kernels.linear.quantization import quantize_channels
from motet_shared.errors import ConfigError
from support.checkpoints.diffusion_checkpoints import FAMILIES, SIZE, load, write_adapter
from support.engine.recording_engine import Pixels, RecordingEngine
from support.running.refusals import refuses

RED = PictureRequest(
    prompt="red circle", steps=3, seed=3, width=SIZE, height=SIZE, guidance_scale=3.0
)
TOLERANCE = 2  # of 255: rows are rounded to 16 bits before they meet integer codes


def dequantized(form: str, weight: torch.Tensor) -> torch.Tensor:
    if form == "fp8":
        return quantize_float8(weight).dense()
    codes, scales = quantize_channels(weight.detach())
    return codes.float() * scales.unsqueeze(1)


def in_blocks(denoiser: nn.Module) -> list[nn.Linear]:
    return [
        module
        for chain in denoiser.modules()
        if isinstance(chain, nn.ModuleList)
        for module in chain.modules()
        if type(module) is nn.Linear and module.in_features >= 32
    ]


def drawn_by(pipeline: Any, drawing: PictureRequest) -> Pixels:
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        prompt=drawing.prompt,
        width=SIZE,
        height=SIZE,
        num_inference_steps=drawing.steps,
        guidance_scale=drawing.guidance_scale,
        generator=torch.Generator().manual_seed(drawing.seed),
        output_type="np",
    ).images
    pixels: Pixels = (images[0] * 255).round().astype(np.int64)
    return pixels


def assert_near(one: Pixels, other: Pixels) -> None:
    assert np.abs(one - other).max() <= TOLERANCE


def denoiser_of(pipeline: Any) -> Any:
    return getattr(pipeline, "transformer", None) or pipeline.unet


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize(
    "family", ["flux", *(pytest.param(name, marks=pytest.mark.long) for name in ("sd", "sd3"))]
)
def test_matrices_in_8_bits_draw_what_their_values_do(
    family: str, form: str, tmp_path: Path
) -> None:
    model = FAMILIES[family](tmp_path / family / "model")
    pipeline = load(model)
    whole = drawn_by(pipeline, RED)
    for linear in in_blocks(denoiser_of(pipeline)):
        linear.weight.data = dequantized(form, linear.weight)
    wanted = drawn_by(pipeline, RED)
    assert (wanted != whole).any()
    with RecordingEngine(model, quantization=form) as recording:
        kinds = [type(module) for module in recording.engine.factory.denoiser.modules()]
        assert kinds.count(QuantizedLinear) == len({*map(id, in_blocks(denoiser_of(pipeline)))})
        assert_near(recording.draw(RED)[0], wanted)
        for drawn in recording.draw_together(RED, RED):
            assert_near(drawn, wanted)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_adapters_stay_whole_beside_matrices_in_codes(tmp_path: Path) -> None:
    model = FAMILIES["flux"](tmp_path / "flux" / "model")
    ink = write_adapter(model, tmp_path / "ink.safetensors", 1)
    pipeline = load(model)
    for linear in in_blocks(denoiser_of(pipeline)):
        linear.weight.data = dequantized("int8", linear.weight)
    plain = drawn_by(pipeline, RED)
    pipeline.load_lora_weights(str(ink.parent), weight_name=ink.name, low_cpu_mem_usage=False)
    inked = drawn_by(pipeline, RED)
    assert np.abs(inked - plain).max() > 5
    with RecordingEngine(model, quantization="int8", loras=(f"ink={ink}",)) as recording:
        drawings = (RED, replace(RED, loras=(Lora("ink"),)))
        for drawn, wanted in zip(recording.draw_together(*drawings), (plain, inked), strict=True):
            assert_near(drawn, wanted)


def write_gguf(folder: Path, file: Path, form: str) -> Path:
    """Write the transformer's weights as a GGUF file: matrices in `form`, the rest in float32."""
    writer = gguf.GGUFWriter(file, "flux")
    kind = gguf.GGMLQuantizationType[form]
    for name, tensor in load_file(folder / "diffusion_pytorch_model.safetensors").items():
        values = tensor.float().numpy()
        coded = tensor.ndim == 2 and "blocks" in name and tensor.shape[1] % 32 == 0
        if coded:
            values = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, values, raw_dtype=kind if coded else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    "form",
    ["Q8_0", *(pytest.param(name, marks=pytest.mark.long) for name in ("Q4_0", "Q5_1", "BF16"))],
)
def test_a_gguf_transformer_draws_what_its_values_do(form: str, tmp_path: Path) -> None:
    model = FAMILIES["flux"](tmp_path / "flux" / "model")
    file = write_gguf(model / "transformer", tmp_path / f"{form}.gguf", form)
    pipeline = load(model)
    whole = drawn_by(pipeline, RED)
    values = {
        tensor.name: torch.from_numpy(
            gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()
        )
        for tensor in gguf.GGUFReader(file).tensors
    }
    pipeline.transformer.load_state_dict(values)
    wanted = drawn_by(pipeline, RED)
    assert (wanted != whole).any()
    for weights in (model / "transformer").glob("*.safetensors"):
        weights.unlink()  # the file is in their place
    with RecordingEngine(model, denoiser=str(file)) as recording:
        kinds = [type(module) for module in recording.engine.factory.denoiser.modules()]
        assert (QuantizedLinear in kinds) == (form != "BF16")
        assert_near(recording.draw(RED)[0], wanted)
        for drawn in recording.draw_together(RED, RED):
            assert_near(drawn, wanted)


def test_files_that_are_no_denoiser_of_a_model_are_refused(tmp_path: Path) -> None:
    model = FAMILIES["flux"](tmp_path / "flux" / "model")
    other = FAMILIES["sd"](tmp_path / "sd")
    good = write_gguf(model / "transformer", tmp_path / "good.gguf", "Q8_0")
    for name, data in (("cut", good.read_bytes()[:2000]), ("text", b"no tensors"), ("empty", b"")):
        (tmp_path / f"{name}.gguf").write_bytes(data)
        with refuses(ConfigError, None if name != "none" else "denoiser"):
            RecordingEngine(model, denoiser=str(tmp_path / f"{name}.gguf"))
    with refuses(ConfigError, "denoiser"):
        RecordingEngine(model, denoiser=str(tmp_path / "none.gguf"))
    with refuses(ConfigError, "denoiser"):
        RecordingEngine(other, denoiser=str(good))
    with refuses(ConfigError, "quantization"):
        RecordingEngine(model, quantization="int3")
    with refuses(ConfigError, "quantization"):
        RecordingEngine(model, quantization="int8", denoiser=str(good))
