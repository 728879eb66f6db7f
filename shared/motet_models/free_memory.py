"""Measure how much memory this process may still allocate: of the machine, within its cgroups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from motet_shared.errors import ConfigError

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
# Names of the limit, the use and the reclaimable part of a memory cgroup, by cgroup version.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_memory() -> int:
    """Return the bytes that can be allocated without swapping and within the cgroups' limits.

    Raises ConfigError if the system does not say.
    """
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
    if match is None:
        raise ConfigError("/proc/meminfo names no MemAvailable; give --memory")
    return min([int(match[1]) * 1024, *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """Yield the bytes that each cgroup of this process with a limit still allows."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left_below(_GROUPS, path, _V2)
        elif "memory" in controllers.split(","):
            yield from _left_below(_GROUPS / "memory", path, _V1)


def _left_below(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """Yield the same for a group and those that contain it; in a container only `root` exists."""
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        if (left := _left(group, *names)) is not None:
            yield left
        if group == root:
            return


def _left(group: Path, limit: str, used: str, reclaimable: str) -> int | None:
    try:
        most, now = int((group / limit).read_text()), int((group / used).read_text())
        stat = (group / "memory.stat").read_text()
    except (OSError, ValueError):  # "max": no limit
        return None
    match = re.search(rf"^{reclaimable} (\d+)$", stat, re.MULTILINE)
    return max(0, most - now + (int(match[1]) if match else 0))
