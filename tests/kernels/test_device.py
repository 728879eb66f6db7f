"""Where a service computes and in which types, and what goes there and comes back."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from motet_kernels.runtime import device as device_module
from motet_kernels.runtime.device import (
    Download,
    check_float16,
    describe,
    dtype_name,
    find_device,
    find_dtype,
    readings,
    upload_all,
)
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Refused(Exception):
    """A service's own error."""


@pytest.mark.parametrize("wanted", ["", "tpu", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0"])
def test_other_words_are_no_devices(wanted: str) -> None:
    with pytest.raises(Refused, match=f"^device='{wanted}'"):
        find_device(wanted, Refused)


def test_a_gpu_that_is_not_there_is_named() -> None:
    found = torch.cuda.device_count()
    with pytest.raises(Refused, match=f"^device='cuda:{found}'"):
        find_device(f"cuda:{found}", Refused)
    with refuses(KernelError, "device"):
        find_device(f"cuda:{found}")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have torch count one GPU of 1,000 bytes; return the shares that its allocator is given."""
    shares: list[float] = []
    uuid = "aaaaaaaa-bbbb-0000-0000-000000000000"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (600, 1000))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid), raising=True
    )
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share)
    )
    monkeypatch.setattr(device_module, "_used", [])
    device_module._identity.cache_clear()
    return shares


def test_a_process_allocates_no_more_than_its_part(
    one_gpu: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_device("cuda")
    assert one_gpu == []
    monkeypatch.setenv("MOTET_GPU_MEMORY", "250")
    assert find_device("cuda:0") == GPU
    monkeypatch.setenv("MOTET_GPU_MEMORY", "5000")
    find_device("cuda")
    assert one_gpu == [0.25, 1.0]
    for wrong in ("much", "0", "-1"):
        monkeypatch.setenv("MOTET_GPU_MEMORY", wrong)
        with pytest.raises(Refused, match=r"^MOTET_GPU_MEMORY="):
            find_device("cuda", Refused)


def test_processes_on_one_gpu_tell_the_same_number(one_gpu: list[float]) -> None:
    find_device("cpu")
    assert "gpu" not in readings()
    find_device("cuda")
    assert readings()["gpu"] == float(0xAAAAAAAABBBB)
    device_module._identity.cache_clear()


def test_the_cpu_is_there() -> None:
    assert find_device("cpu") == CPU
    assert describe(CPU)["device"] == "cpu"
    assert describe(CPU)["kernels"]


@pytest.mark.parametrize(
    ("own", "device", "wanted", "found"),
    [
        (BF16, CPU, "auto", F32),
        (F16, CPU, "auto", F32),
        (None, CPU, "auto", F32),
        (F32, CPU, "bfloat16", BF16),
        (BF16, GPU, "auto", BF16),
        (F16, GPU, "auto", F16),
        (F32, GPU, "auto", F32),
        (None, GPU, "auto", F32),
        (torch.float64, GPU, "auto", F32),
        (BF16, GPU, "float16", F16),
        (BF16, GPU, "float32", F32),
    ],
)
def test_types_follow_the_checkpoint_and_the_device(
    own: torch.dtype | None, device: torch.device, wanted: str, found: torch.dtype
) -> None:
    assert find_dtype(wanted, own, device, Refused) == found
    assert getattr(torch, dtype_name(found)) == found


def test_float16_is_for_gpus() -> None:
    with pytest.raises(Refused, match=r"^dtype='float16'"):
        find_dtype("float16", F16, CPU, Refused)
    with pytest.raises(Refused, match=r"^weights='float16'"):
        check_float16("weights", "float16", CPU, Refused)
    check_float16("weights", "float16", GPU, Refused)


def test_arrays_keep_their_shapes_on_the_way() -> None:
    """On a device that is not the CPU they travel as one."""
    arrays = [np.arange(3), np.arange(6).reshape(3, 2), np.arange(0)]
    assert [part.tolist() for part in upload_all(arrays, CPU)] == [
        array.tolist() for array in arrays
    ]
    there = upload_all(arrays, torch.device("meta"))
    assert [(part.shape, part.dtype) for part in there] == [
        (array.shape, torch.int64) for array in arrays
    ]
    assert all(part.storage_offset() % 2 == 0 for part in there)


def test_what_comes_back_is_waited_for() -> None:
    assert Download(torch.arange(3)).wait().tolist() == [0, 1, 2]
