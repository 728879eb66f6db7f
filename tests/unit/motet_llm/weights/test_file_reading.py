"""A file is read into memory: from the page cache or past it, whole, or with a reason."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from motet_kernels.runtime.memory import huge_zeros
from motet_llm.weights import file_reading
from motet_llm.weights.file_reading import PAGE, FileReading
from motet_shared.process.exits import identity_of
from motet_shared.process.memory_turn import MemoryTurn

SIZE = 40 << 20  # more than a shared chunk of huge pages holds


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(torch.arange((PAGE + SIZE) // 8).numpy().tobytes())
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


def forget(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("size", [SIZE, SIZE - 8, PAGE, 0])
def test_every_byte_is_read(path: Path, size: int, cached: bool) -> None:
    if cached:
        path.read_bytes()
    else:
        forget(path)
    memory = huge_zeros((size,), torch.uint8)
    FileReading(opened(path), PAGE, memory).wait()
    assert torch.equal(memory.view(torch.int64), torch.arange(PAGE // 8, (PAGE + size) // 8))


def test_a_file_system_with_other_rules_for_direct_reads_is_read_as_usual(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of half pages at odd addresses are refused as such file systems refuse them."""
    monkeypatch.setattr(FileReading, "_is_cached", lambda self: False)
    monkeypatch.setattr(file_reading, "PAGE", 1)
    forget(path)
    memory = torch.zeros(SIZE + 1, dtype=torch.uint8)[1 : SIZE - 6]
    FileReading(opened(path), PAGE, memory).wait()
    expected = torch.arange(PAGE // 8, (PAGE + SIZE) // 8).view(torch.uint8)[: len(memory)]
    assert torch.equal(memory, expected)


def test_a_file_that_is_too_short_is_an_error(path: Path) -> None:
    os.truncate(path, SIZE // 2)
    with pytest.raises(OSError, match="too early"):
        FileReading(opened(path), PAGE, huge_zeros((SIZE,), torch.uint8)).wait()


def test_no_memory_is_taken_before_others_have_ended(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        identity = identity_of(other.pid)
        assert identity is not None
        memory = huge_zeros((SIZE,), torch.uint8)
        reading = FileReading(opened(path), PAGE, memory, MemoryTurn(exits=[identity]))
        time.sleep(0.2)
        assert not memory.any()
        other.kill()
    reading.wait()
    assert memory.any()
