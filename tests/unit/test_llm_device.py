"""Where the engine computes, and in which types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from checkpoints import tiny_checkpoint
from motet_llm import checkpoint
from motet_llm.config import EngineConfig
from motet_llm.device import Download, describe, find_device, upload_all
from motet_llm.engine import Engine
from motet_shared.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("wanted", ["", "tpu", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0"])
def test_other_words_are_no_devices(wanted: str) -> None:
    with pytest.raises(ConfigError, match=rf"device='{wanted}': give cpu, cuda or, of several GPUs, cuda:1"):
        find_device(wanted)


def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=rf"device='cuda:{found}': torch sees {found} GPUs.*; give cpu"):
        find_device(f"cuda:{found}")
    folder = tiny_checkpoint("llama", tmp_path)
    with pytest.raises(ConfigError, match=rf"device='cuda:{found}'"):
        Engine(EngineConfig(model=str(folder), device=f"cuda:{found}"))


def test_the_cpu_is_there() -> None:
    assert find_device("cpu") == CPU
    assert describe(CPU)["device"] == "cpu"


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
    assert checkpoint.resolve_dtype(config, wanted, device) == dtype
    assert checkpoint.resolve_weights(config, "auto", dtype, device) == weights
    assert checkpoint.resolve_kv_dtype(config, "auto", dtype, device) == kv_dtype
    assert checkpoint.loaded_dtype(config, weights, dtype, device) == loaded
    assert checkpoint.resolve_weights(config, "int4", dtype, device) == "int4"


def test_float16_is_for_gpus() -> None:
    config = LlamaConfig()
    with pytest.raises(ConfigError, match="dtype='float16': CPUs compute it slowly; give bfloat16 or float32"):
        checkpoint.resolve_dtype(config, "float16", CPU)
    with pytest.raises(ConfigError, match="weights='float16'"):
        checkpoint.resolve_weights(config, "float16", F32, CPU)
    with pytest.raises(ConfigError, match="kv_dtype='float16'"):
        checkpoint.resolve_kv_dtype(config, "float16", F32, CPU)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_is_a_share(share: float, tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    with pytest.raises(ConfigError, match=rf"gpu_share={share}: give a share of the free memory"):
        EngineConfig(model=str(folder), gpu_share=share)


def test_arrays_keep_their_shapes_on_the_way() -> None:
    """On a device that is not the CPU they travel as one."""
    arrays = [np.arange(3), np.arange(6).reshape(3, 2), np.arange(0)]
    assert [part.tolist() for part in upload_all(arrays, CPU)] == [array.tolist() for array in arrays]
    there = upload_all(arrays, torch.device("meta"))
    assert [(part.shape, part.dtype) for part in there] == [(array.shape, torch.int64) for array in arrays]
    assert all(part.storage_offset() % 2 == 0 for part in there)


def test_what_comes_back_is_waited_for() -> None:
    assert Download(torch.arange(3)).wait().tolist() == [0, 1, 2]
