"""Where the engine computes, and in which types."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from motet_kernels.runtime.device import find_dtype
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.weights import checkpoint
from motet_shared.errors import ConfigError
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.running.refusals import refuses

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("wanted", ["tpu", f"cuda:{torch.cuda.device_count()}"])
def test_a_device_that_is_not_there_is_refused(wanted: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    with refuses(ConfigError, "device"):
        Engine(EngineConfig(model=str(folder), device=wanted))


@pytest.mark.parametrize(
    ("of_checkpoint", "device", "wanted", "dtype", "weights", "kv_dtype", "loaded"),
    [
        (BF16, CPU, "auto", F32, "bfloat16", BF16, BF16),
        (F16, CPU, "auto", F32, "float32", F32, F32),
        (F32, CPU, "auto", F32, "float32", F32, F32),
        (BF16, CPU, "bfloat16", BF16, "bfloat16", BF16, BF16),
        (BF16, GPU, "auto", BF16, "bfloat16", BF16, BF16),
        (F16, GPU, "auto", F16, "float16", F16, F16),
        (F32, GPU, "auto", F32, "float32", F32, F32),
        (F32, GPU, "bfloat16", BF16, "bfloat16", BF16, BF16),
        (BF16, GPU, "float32", F32, "float32", BF16, F32),
        (BF16, GPU, "float16", F16, "float16", F16, F16),
    ],
)
def test_types_follow_the_checkpoint_and_the_device(
    of_checkpoint: torch.dtype,
    device: torch.device,
    wanted: str,
    dtype: torch.dtype,
    weights: str,
    kv_dtype: torch.dtype,
    loaded: torch.dtype,
) -> None:
    config = LlamaConfig(dtype=of_checkpoint)
    assert find_dtype(wanted, of_checkpoint, device) == dtype
    assert checkpoint.resolve_weights(config, "auto", dtype, device) == weights
    assert checkpoint.resolve_kv_dtype(config, "auto", dtype, device) == kv_dtype
    assert checkpoint.loaded_dtype(config, weights, dtype, device) == loaded
    assert checkpoint.resolve_weights(config, "int4", dtype, device) == "int4"


def test_float16_is_for_gpus(tmp_path: Path) -> None:
    config = LlamaConfig()
    folder = tiny_checkpoint("llama", tmp_path)
    with refuses(ConfigError, "dtype"):
        Engine(EngineConfig(model=str(folder), dtype="float16"))
    with refuses(ConfigError, "weights"):
        checkpoint.resolve_weights(config, "float16", F32, CPU)
    with refuses(ConfigError, "kv_dtype"):
        checkpoint.resolve_kv_dtype(config, "float16", F32, CPU)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_is_a_share(share: float, tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    with pytest.raises(ConfigError) as raised:
        EngineConfig(model=str(folder), memory_share=share)
    assert raised.value.param == "memory_share"
