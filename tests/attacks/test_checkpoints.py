"""Checkpoints with numbers that cannot be: every service that loads one refuses it by name, before it serves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from motet_asr.checkpoint import load_engine as load_asr
from motet_asr.config import EngineConfig as AsrConfig
from motet_diffusion.config import EngineConfig as DiffusionConfig
from motet_diffusion.pipeline.pipeline_factory import PipelineFactory
from motet_embedding.config import EngineConfig as EmbeddingConfig
from motet_embedding.encoder import Encoder
from motet_encoder.checkpoint import load_family
from motet_kernels.linear.gguf_blocks import read_blocks
from motet_llm.weights import checkpoint
from motet_llm.weights.coded_linear import checked
from motet_models.checkpoints import check_checkpoint
from motet_models.checkpoints.numbers import faults
from motet_shared.errors import ConfigError
from motet_speakers.encoder import SpeakerEncoder
from motet_tts.checkpoint import load as load_tts
from motet_tts.config import EngineConfig as TtsConfig
from motet_vad.turns import TurnModel
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.checkpoints.quantized_checkpoints import awq, compressed, gptq
from support.running.refusals import refuses

MODELS = Path(__file__).parents[2] / "models"
SHIPPED = sorted(path for path in MODELS.glob("pocket-*"))


def load_chat(folder: Path) -> None:
    checkpoint.load_model(folder, checkpoint.load_config(folder), torch.float32)


# What ships, the part of it that has weights, and how a service loads it.
LOADERS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "llm": ("pocket-chat", "", load_chat),
    "encoder": ("pocket-chat", "", lambda folder: load_family(folder, None)),
    "asr": ("pocket-asr", "", lambda folder: load_asr(AsrConfig(model=str(folder)))),
    "tts": ("pocket-tts", "", lambda folder: load_tts(TtsConfig(model=str(folder)))),
    "diffusion": (
        "pocket-draw",
        "vae",
        lambda folder: PipelineFactory(DiffusionConfig(model=str(folder))),
    ),
    "embedding": (
        "pocket-embed",
        "",
        lambda folder: Encoder.load(EmbeddingConfig(model=str(folder))),
    ),
    "speakers": ("pocket-speakers", "", lambda folder: SpeakerEncoder.load(str(folder))),
    "turns": ("pocket-turns", "", lambda folder: TurnModel.load(str(folder))),
}


@pytest.fixture(params=LOADERS)
def shipped(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[str, Path, Callable[[Path], Any]]:
    """The service, its part with weights in a copy of the model, and a function that loads the copy."""
    name, part, load = LOADERS[request.param]
    folder = Path(shutil.copytree(MODELS / name, tmp_path / name))
    return request.param, folder / part, lambda _: load(folder)


def spoil(folder: Path, value: float, wanted: str = "") -> str:
    """Put `value` into the last number of a tensor whose name has `wanted`; return the tensor's name."""
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    name = next(
        name
        for name, tensor in sorted(weights.items())
        if wanted in name and tensor.is_floating_point()
    )
    weights[name].view(-1)[-1] = value
    save_file(weights, path, metadata={"format": "pt"})
    return name


def edit(folder: Path, path: str, value: Any, file: str = "config.json") -> None:
    """Set a field of a config; `path` is dotted."""
    config = json.loads((folder / file).read_text())
    inner = config
    *parents, last = path.split(".")
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    (folder / file).write_text(json.dumps(config))


# -------------------------------------------------------------------------------------------------------- every service
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(shipped: Any, value: float) -> None:
    service, folder, load = shipped
    name = spoil(folder, value, "vision_tower" if service == "encoder" else "")
    with pytest.raises(ConfigError, match=r"NaN|infinite") as refusal:
        load(folder)
    assert name in str(refusal.value)
    assert "safetensors" in str(refusal.value)


def test_config_numbers_that_are_not_finite_are_refused_by_name(shipped: Any) -> None:
    _, folder, load = shipped
    edit(folder, "some_number", float("nan"))
    with pytest.raises(ConfigError, match="some_number"):
        load(folder)


def test_weights_of_other_parts_do_not_concern_the_vision_tower(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MODELS / "pocket-chat", tmp_path / "chat"))
    spoil(folder, float("nan"), "language_model")
    load_family(folder, None)


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda path: path.name)
def test_what_ships_is_let_through(folder: Path) -> None:
    for part in (folder, *(inner for inner in folder.iterdir() if inner.is_dir())):
        check_checkpoint(part)


# -------------------------------------------------------------------------------------------------- the language model
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", -1),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", float("nan")),
        ("rope_parameters.rope_theta", float("nan")),
        ("rope_parameters.rope_theta", 0),
        ("rope_parameters.rope_theta", -10000.0),
        ("rope_parameters.factor", -2.0),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 1_000_000_000),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", -2),
        ("hidden_size", 0),
        ("hidden_size", 64.5),
        ("head_dim", -16),
        ("vocab_size", -5),
        ("vocab_size", 10**30),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", -512),
        ("final_logit_softcapping", -30.0),
        ("made_up_limit", float("inf")),
    ],
)
def test_numbers_that_no_model_can_have_are_refused(
    field: str, value: float, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("qwen3", tmp_path / "model")
    edit(folder, field, value)
    with pytest.raises(ConfigError) as refusal:
        checkpoint.load_config(folder)
    assert f"{field}=" in str(refusal.value)
    assert "give" in str(refusal.value)
    assert "config.json" in str(refusal.value)


def test_sizes_of_the_config_must_be_those_of_the_tensors(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3", tmp_path / "model")
    edit(folder, "vocab_size", 100_000)
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight .*259, 64.*100000, 64"):
        load_chat(folder)


def test_numbers_that_only_the_arithmetic_shows_are_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model")
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    weights["model.norm.weight"][:] = 3e38  # finite, but its sums are not
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError):
        load_chat(folder)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]
)
@pytest.mark.parametrize("at", [0, 700_001, 1_500_000])
def test_every_width_and_every_block_is_looked_at(
    dtype: torch.dtype, at: int, tmp_path: Path
) -> None:
    for value in (float("nan"), float("-inf")):
        tensor = torch.full((1_500_001,), -2.0).to(dtype)
        save_file({"a": torch.ones(3), "w": tensor}, tmp_path / "model.safetensors")
        check_checkpoint(tmp_path)
        tensor[at] = value
        save_file({"a": torch.ones(3), "w": tensor}, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=rf"w\[{at}\]"):
            check_checkpoint(tmp_path)


def test_float8_without_infinity_has_its_largest_number(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    save_file({"w": finite}, tmp_path / "model.safetensors")
    check_checkpoint(tmp_path)
    for bits in (0x7F, 0xFF):
        spoiled = torch.tensor([[0, bits]], dtype=torch.uint8).view(torch.float8_e4m3fn)
        save_file({"w": spoiled}, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=r"w\[0, 1\]"):
            check_checkpoint(tmp_path)


def test_limits_that_are_published_as_infinite_are_let_through() -> None:
    assert not list(
        faults({"time_step_limit": [0.0, float("inf")], "lambda_min_clipped": float("-inf")})
    )
    assert list(faults({"time_step_limit": [0.0, float("nan")]}))


# --------------------------------------------------------------------------------------------------- quantized formats
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed"])
def test_scales_that_are_not_finite_are_refused_by_name(
    kind: str, value: float, tmp_path: Path
) -> None:
    make = {
        "gptq": gptq,
        "awq": awq,
        "compressed": lambda folder: compressed(folder, "pack-quantized"),
    }[kind]
    folder, _ = make(tmp_path)
    name = spoil(folder, value, "scale")
    with pytest.raises(ConfigError, match=r"NaN|infinite") as refusal:
        load_chat(folder)
    assert name in str(refusal.value)


@pytest.mark.parametrize("part", ["weight", "weight_zero_point"])
def test_integers_beyond_their_bits_are_refused(part: str, tmp_path: Path) -> None:
    folder, _ = compressed(tmp_path, "int-quantized", symmetric=False)
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    name = next(
        name
        for name in sorted(weights)
        if name.endswith(part) and weights[name].dtype == torch.int8
    )
    weights[name].view(-1)[0] = 100
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="4") as refusal:
        load_chat(folder)
    assert name.rpartition(".")[0] in str(refusal.value)


def test_scales_of_gguf_blocks_are_looked_at() -> None:
    block = np.zeros((1, 34), np.uint8)
    block[0, :2] = np.array([np.nan], np.float16).view(np.uint8)
    read = read_blocks("Q8_0", torch.from_numpy(block))
    with refuses(ConfigError, "blk.0"):
        checked("blk.0", *read[:4])
