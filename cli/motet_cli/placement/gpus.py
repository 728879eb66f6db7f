"""List the GPUs that this program's processes may use: nvidia-smi's, within CUDA_VISIBLE_DEVICES.

A process is given its GPUs by their UUIDs, so that it does not matter in which order CUDA numbers
them. Numbers in CUDA_VISIBLE_DEVICES are taken for those of nvidia-smi (PCI order).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY = ("index", "uuid", "name", "memory.total", "memory.free")
_COMMAND = ("nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
_SECONDS = 20.0  # the driver takes some to wake up a machine with many GPUs
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Describe a GPU.

    number: its place among the visible ones, as in `cuda:0`. key: its name in CUDA_VISIBLE_DEVICES.
    total, free: bytes of memory; 0: unknown, as of a part of a GPU (MIG).
    """

    number: int
    key: str
    name: str
    total: int = 0
    free: int = 0


@dataclass(frozen=True, slots=True)
class GpuListing:
    """Hold the visible GPUs, and why there are none."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


def list_gpus(env: Mapping[str, str] | None = None) -> GpuListing:
    """Return the GPUs that a process with this environment can use, in the order of its numbers."""
    env = os.environ if env is None else env
    try:
        done = subprocess.run(
            _COMMAND, capture_output=True, text=True, timeout=_SECONDS, check=True, env=dict(env)
        )
    except FileNotFoundError:
        return GpuListing(problem="nvidia-smi is not installed")
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "").strip().partition("\n")[0]
        return GpuListing(problem=f"nvidia-smi failed ({error.returncode}): {said[:200]}")
    except (OSError, subprocess.SubprocessError) as error:
        return GpuListing(problem=f"nvidia-smi failed: {error}")
    installed = [gpu for line in done.stdout.splitlines() if (gpu := _parse(line)) is not None]
    if not installed:
        return GpuListing(problem="nvidia-smi lists no GPU")
    found = visible(installed, env.get(VISIBLE))
    return GpuListing(found, "" if found else f"{VISIBLE}={env.get(VISIBLE)!r} leaves none")


def _parse(line: str) -> Gpu | None:
    """Return the GPU of a line of nvidia-smi; None for a line that describes none."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(_QUERY) or not fields[0].isdecimal():
        return None
    index, key, name, total, free = fields
    return Gpu(number=int(index), key=key, name=name, total=_bytes(total), free=_bytes(free))


def _bytes(mebibytes: str) -> int:
    """Return nvidia-smi's number in bytes; 0 for "[N/A]", as of GPUs in MIG mode."""
    return int(mebibytes) * _MIB if mebibytes.isdecimal() else 0


def visible(installed: Sequence[Gpu], given: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; None: all of them.

    As CUDA does: entries behind one that names no GPU, or that is of another kind than the first
    (number, UUID, MIG), are ignored, and an entry that is there twice leaves no GPU at all.
    """
    if given is None:
        return _numbered(installed)
    entries = [entry.strip() for entry in given.split(",")]
    alike = list(takewhile(lambda entry: _kind(entry) == _kind(entries[0]) != "", entries))
    named = [_named(installed, entry) for entry in alike]
    found = [gpu for gpu in takewhile(lambda gpu: gpu is not None, named) if gpu is not None]
    keys = [gpu.key for gpu in found]
    if len(set(keys)) < len(keys) or len(set(alike)) < len(alike):
        return ()
    return _numbered(found)


def _kind(entry: str) -> str:
    """Return how an entry names a GPU; "" if it names none."""
    if entry.isdecimal():
        return "number"
    return next((kind for kind in ("GPU-", "MIG-") if entry.startswith(kind)), "")


def _named(installed: Sequence[Gpu], entry: str) -> Gpu | None:
    """Return the GPU that an entry names: its number, the beginning of its UUID, or a MIG part."""
    if entry.isdecimal():
        return next((gpu for gpu in installed if gpu.number == int(entry)), None)
    if entry.startswith("MIG-"):
        return Gpu(number=0, key=entry, name="MIG")
    matching = [gpu for gpu in installed if gpu.key.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _numbered(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    return tuple(replace(gpu, number=number) for number, gpu in enumerate(gpus))
