"""Measure the memory of a stack's processes, each page shared out among those that map it (PSS)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_MODULE = re.compile(r"-m motet_([a-z_.]+)")


@dataclass(frozen=True)
class ProcessMemory:
    """Hold the bytes of one process: its PSS, and of it anonymous, shared and file-backed memory."""

    name: str
    pss: int
    anonymous: int
    shared: int
    files: int


def memory_of(root: int, names: Mapping[int, str]) -> list[ProcessMemory]:
    """Return the memory of a process and of all that it has started, the largest first.

    names: names of processes by their ids; others are named after what they run.
    """
    found = (_read(pid, names.get(pid) or _name(pid)) for pid in _tree(root))
    return sorted((memory for memory in found if memory), key=lambda memory: -memory.pss)


def total(processes: Iterable[ProcessMemory]) -> int:
    """Return the bytes of all."""
    return sum(memory.pss for memory in processes)


def _tree(root: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _parent(int(entry))) is not None:
            children.setdefault(parent, []).append(int(entry))
    pending = [root]
    while pending:
        yield (pid := pending.pop())
        pending += children.get(pid, ())


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended
        return None
    return int(stat.rpartition(")")[2].split()[1])


def _name(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        program = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return str(pid)
    module = _MODULE.search(line)
    return program if module is None else module[1].rpartition(".")[2].removesuffix("_process")


def rollup(pid: int) -> dict[str, int]:
    """Return the sizes of a process's memory in bytes, by the kernel's names (`smaps_rollup`).

    Raises OSError if it has ended.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith("kB")}


def _read(pid: int, name: str) -> ProcessMemory | None:
    try:
        sizes = rollup(pid)
    except OSError:
        return None
    if "Pss" not in sizes:
        return None
    kinds = (sizes[f"Pss_{kind}"] for kind in ("Anon", "Shmem", "File"))
    return ProcessMemory(name, sizes["Pss"], *kinds)
