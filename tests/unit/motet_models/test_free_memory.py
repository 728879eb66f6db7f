"""How much memory is free: that of the machine, or what cgroups leave of it."""

from pathlib import Path

import pytest

from motet_models import free_memory
from motet_shared.errors import ConfigError

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a machine of 8 GiB available memory, and no cgroups."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    monkeypatch.setattr(free_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "_OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(free_memory, "_GROUPS", tmp_path / "groups")
    return tmp_path


def group(folder: Path, limit: str, used: int, cache: int, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = free_memory._V2 if version == 2 else free_memory._V1
    (folder / names[0]).write_text(limit)
    (folder / names[1]).write_text(str(used))
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\n")


def test_the_machine_bounds_a_process_without_groups(machine: Path) -> None:
    assert free_memory.available_memory() == 8 * GIB


@pytest.mark.parametrize(("version", "line"), [(2, "0::/a/b"), (1, "4:cpu,memory:/a/b")])
def test_the_tightest_group_bounds_it(machine: Path, version: int, line: str) -> None:
    (machine / "cgroup").write_text(line)
    root = machine / "groups" / ("memory" if version == 1 else "")
    group(root / "a", str(3 * GIB), used=2 * GIB, cache=GIB, version=version)
    group(root / "a" / "b", str(5 * GIB), used=1 * GIB, cache=0, version=version)
    assert free_memory.available_memory() == 2 * GIB


def test_in_a_container_the_own_group_is_the_root(machine: Path) -> None:
    (machine / "cgroup").write_text("0::/system.slice/container-1")
    group(machine / "groups", str(GIB), used=0, cache=0)
    assert free_memory.available_memory() == GIB


def test_a_group_without_limit_bounds_nothing(machine: Path) -> None:
    (machine / "cgroup").write_text("0::/a")
    group(machine / "groups" / "a", "max", used=GIB, cache=0)
    assert free_memory.available_memory() == 8 * GIB


def test_a_system_that_does_not_say_is_an_error(machine: Path) -> None:
    (machine / "meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(ConfigError):
        free_memory.available_memory()
