"""Stand in for NVIDIA's driver: an `nvidia-smi` on PATH, and what torch asks NVML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

UUIDS = tuple(f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abcdefgh")


def put_nvidia_smi(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: Sequence[int | str],
    name: str = "Fake 80GB",
) -> None:
    """Put an `nvidia-smi` first on PATH that lists a GPU for each of `free`, in MiB."""
    lines = [
        f"{number}, {UUIDS[number]}, {name}, {mebibytes}, {mebibytes}"
        for number, mebibytes in enumerate(free)
    ]
    put_program(folder, monkeypatch, "\n".join(f"echo '{line}'" for line in lines))
    for variable in ("CUDA_VISIBLE_DEVICES", "MOTET_DEVICE", "MOTET_MEMORY_SHARE"):
        monkeypatch.delenv(variable, raising=False)


def put_program(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a program `nvidia-smi` first on PATH."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    program = programs / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")


def put_nvml(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Have NVML tell torch of so many GPUs."""
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: count)
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: list(UUIDS[:count]))
