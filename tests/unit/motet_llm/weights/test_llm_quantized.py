"""Ready-made quantized checkpoints compute what transformers computes with the weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet_shared.errors import ConfigError
from support.checkpoints import more_quantized_checkpoints as more
from support.checkpoints import quantized_checkpoints as made
from support.checkpoints.quantized_checkpoints import TOKENS, answer, check, engine_of

NAME = "model.layers.1.mlp.up_proj"
MADE: dict[str, tuple[Callable[[Path], tuple[Path, Path]], str]] = {
    "gptq": (lambda at: made.gptq(at), "int4:64"),
    "gptq v2, zero points": (
        lambda at: made.gptq(at, symmetric=False, version="gptq_v2"),
        "int4:64",
    ),
    "gptq, zero points, desc_act": (
        lambda at: made.gptq(at, symmetric=False, act=True, group=32),
        "int4:32",
    ),
    "gptq, eight bits, one group": (lambda at: made.gptq(at, bits=8, group=-1), "int8:"),
    "gptq, eight bits, zero points": (
        lambda at: made.gptq(at, bits=8, symmetric=False, group=128),
        "int8:128",
    ),
    "awq": (lambda at: made.awq(at), "int4:64"),
    "awq, gemv": (lambda at: made.awq(at, version="gemv"), "int4:64"),
    "packed int4": (lambda at: made.compressed(at, "pack-quantized", group=32), "int4:32"),
    "packed int4, zero points": (
        lambda at: made.compressed(at, "pack-quantized", group=128, symmetric=False),
        "int4:128",
    ),
    "packed int4, groups of 16": (
        lambda at: made.compressed(at, "pack-quantized", group=16),
        "int4:16",
    ),
    "packed int8": (lambda at: made.compressed(at, "pack-quantized", bits=8), "int8:"),
    "int8": (lambda at: made.compressed(at, "int-quantized", bits=8), "int8:"),
    "int8, zero points": (
        lambda at: made.compressed(at, "naive-quantized", bits=8, symmetric=False),
        "int8:",
    ),
    "float8": (lambda at: made.compressed(at, "float-quantized", kind="float", bits=8), "float8:"),
    "float8, blocks": (
        lambda at: made.compressed(at, "naive-quantized", kind="float", bits=8, block=64),
        "float8:64",
    ),
    "fp8, blocks of 128": (more.float8_blocks, "float8:128"),
    "fp8, a scale per matrix": (lambda at: more.float8_blocks(at, 0), "float8:"),
    "nf4": (lambda at: more.bnb_four_bits(at, "nf4", nested=False), "nf4:64"),
    "nf4, nested scales": (lambda at: more.bnb_four_bits(at, "nf4", nested=True), "nf4:64"),
    "LLM.int8": (more.bnb_eight_bits, "int8:"),
}


@pytest.mark.parametrize("kind", MADE)
def test_it_computes_what_its_weights_stand_for(kind: str, tmp_path: Path) -> None:
    make, form = MADE[kind]
    check(*make(tmp_path), form)


def test_fp4_of_bitsandbytes(tmp_path: Path) -> None:
    check(*more.bnb_four_bits(tmp_path, "fp4", nested=False), "bnb_fp4:64", precise=2e-3)


def test_what_is_not_in_codes_takes_the_format_that_is_asked_for(tmp_path: Path) -> None:
    quantized, _ = made.awq(tmp_path)
    engine = engine_of(quantized, weights="int8")
    assert engine.runner.describe()["weights"].endswith(", int8")
    assert len(answer(engine)[0]) == TOKENS


def _add(folder: Path, **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, {"format": "pt"})


def test_tensors_that_change_nothing_are_dropped(tmp_path: Path) -> None:
    """As AutoGPTQ wrote them: biases of zeros, and frequencies of rotary embeddings."""
    quantized, dense = made.gptq(tmp_path)
    unused = {
        f"{NAME}.bias": torch.zeros(512),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32),
    }
    _add(quantized, **unused)
    check(quantized, dense, "int4:64")
    _add(quantized, **{f"{NAME}.bias": torch.ones(512)})
    with pytest.raises(ConfigError, match=rf"unknown {NAME}\.bias"):
        engine_of(quantized)


# ---------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("end", "value"),
    [
        ("weight.quant_map", torch.zeros(16)),
        ("weight.absmax", torch.ones(3)),
        ("weight.quant_state.bitsandbytes__nf4", torch.zeros(4, dtype=torch.uint8)),
        (
            "weight.quant_state.bitsandbytes__nf4",
            torch.frombuffer(bytearray(b'{"blocksize": 48}'), dtype=torch.uint8),
        ),
    ],
)
def test_tensors_of_bitsandbytes_that_do_not_fit_are_named(
    end: str, value: torch.Tensor, tmp_path: Path
) -> None:
    quantized, _ = more.bnb_four_bits(tmp_path, "nf4", nested=False)
    _add(quantized, **{f"{NAME}.{end}": value})
    with pytest.raises(ConfigError, match=rf"{NAME}\.weight"):
        engine_of(quantized)


def test_block_sizes_of_float8_that_do_not_fit_are_named(tmp_path: Path) -> None:
    quantized, _ = more.float8_blocks(tmp_path)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 100]}
    made.set_config(quantized, quantization_config=settings)
    with pytest.raises(ConfigError, match="weight_block_size"):
        engine_of(quantized)


@pytest.mark.parametrize("method", ["hqq", "exl2", None])
def test_methods_that_are_not_read_are_named(method: str | None, tmp_path: Path) -> None:
    quantized, _ = made.gptq(tmp_path)
    made.set_config(quantized, quantization_config={"quant_method": method, "load_in_4bit": True})
    with pytest.raises(ConfigError, match="quant_method"):
        engine_of(quantized)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"bits": 3}, r"quantization_config\.bits=3"),
        ({"group_size": 48}, "qzeros|scales"),
        ({"group_size": 7}, r"quantization_config\.group_size=7"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    ],
)
def test_settings_that_do_not_fit_are_named(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    quantized, _ = made.gptq(tmp_path)
    settings = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 64,
        "checkpoint_format": "gptq",
        **change,
    }
    made.set_config(quantized, quantization_config=settings)
    with pytest.raises(ConfigError, match=named):
        engine_of(quantized)


@pytest.mark.parametrize(
    ("end", "value", "named"),
    [
        ("scales", None, rf"{NAME}\.scales"),
        (
            "qweight",
            torch.zeros(3, 512, dtype=torch.int32),
            rf"{NAME}\.qweight .*\[3, 512\].*\[32, 512\]",
        ),
        ("scales", torch.full((4, 512), torch.nan), rf"{NAME}\.scales\[0, 0\]"),
        (
            "g_idx",
            torch.zeros(256, dtype=torch.int32),
            rf"{NAME}\.g_idx: .*group_size=64",
        ),
        ("extra", torch.zeros(1), rf"{NAME}\.extra"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    end: str, value: torch.Tensor | None, named: str, tmp_path: Path
) -> None:
    quantized, _ = made.gptq(tmp_path)
    path = quantized / "model.safetensors"
    tensors = load_file(path)
    if value is None:
        del tensors[f"{NAME}.{end}"]
    else:
        tensors[f"{NAME}.{end}"] = value
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=named):
        engine_of(quantized)
