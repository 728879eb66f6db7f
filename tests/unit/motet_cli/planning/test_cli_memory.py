"""How `motet up` divides the free memory among the language models that it starts."""

from pathlib import Path

import pytest

from motet_cli.supervision import memory
from motet_cli.supervision.memory import MemoryDivision
from motet_shared.errors import ConfigError


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return two checkpoints of 100 and 300 bytes, on a machine with 2,000 free bytes."""
    monkeypatch.setattr(memory, "available_memory", lambda: 2000)
    for name in memory.BOUNDS:
        monkeypatch.delenv(name, raising=False)
    found = []
    for name, size in (("small", 100), ("large", 300)):
        folder = tmp_path / name
        (folder / "part").mkdir(parents=True)
        (folder / "part" / "model.safetensors").write_bytes(bytes(size))
        (folder / "notes.txt").write_bytes(bytes(1000))
        found.append(folder)
    return found


def given(division: MemoryDivision, folder: Path, **env: str) -> list[str]:
    return division.arguments(folder, env)


def test_each_engine_has_its_weights_and_an_equal_part_of_the_rest(folders: list[Path]) -> None:
    small, large = folders
    division = MemoryDivision.measure(0.5, [small, large, large], [])
    assert division.total == 1000
    assert given(division, small) == ["--memory", "200"]  # 100 + (1000 - 700) / 3
    assert given(division, large) == ["--memory", "400"]


def test_other_models_come_first(folders: list[Path]) -> None:
    small, large = folders
    assert MemoryDivision.measure(0.5, [small], [large]).total == 700
    assert given(MemoryDivision.measure(0.1, [large], [small]), large) == ["--memory", "100"]


def test_a_bound_that_is_set_is_kept(folders: list[Path]) -> None:
    division = MemoryDivision.measure(0.5, folders, [])
    assert given(division, folders[0], MOTET_KV_MEMORY="1GiB") == []
    assert given(division, folders[0], MOTET_MEMORY="1GiB") == []


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_is_a_share(share: float, folders: list[Path]) -> None:
    with pytest.raises(ConfigError):
        MemoryDivision.measure(share, folders, [])
