"""Configurations that are chosen by timing, kept by device: with a driver and a clock that are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from motet_kernels.gpu import launch
from motet_kernels.gpu.launch import Config, GpuKernel, set_chooser
from motet_kernels.gpu.tuning import (
    Choices,
    Timed,
    TunedChooser,
    choices_path,
    fastest,
    tuning,
    use_tuned,
)

SMALL, LARGE = (Config(constants={"TILE": size}) for size in (16, 64))
X = torch.zeros(4)


class Function:
    """Stand for a Triton function: note the tile of each launch; refuse those in `refused`."""

    def __init__(self, name: str = "scale") -> None:
        self.fn = SimpleNamespace(__name__=name)
        self.tiles: list[int] = []
        self.refused: set[int] = set()

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        def run(*_: Any, TILE: int, **__: Any) -> None:
            if TILE in self.refused:
                raise RuntimeError("out of shared memory")
            self.tiles.append(TILE)

        return run


class Clock:
    """Time a run by the tile that it launches."""

    def __init__(self, function: Function, seconds: dict[int, float]):
        self._function, self._seconds = function, seconds

    def __call__(self, run: Callable[[], None]) -> float:
        run()
        return self._seconds[self._function.tiles[-1]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Pretend that tensors are on a GPU with this name and capability."""
    about: dict[str, Any] = {"name": "NVIDIA Made Up 80GB", "capability": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: about["name"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: about["capability"])
    monkeypatch.setattr(launch, "_on_gpu", lambda _args: True)
    yield about
    set_chooser(None)


def never() -> bool:
    return False


def tune(folder: Path, kernel: GpuKernel, clock: Clock, **constants: Any) -> list[Timed]:
    choices = Choices.read(choices_path(X.device, folder))
    with tuning(choices, clock, never) as timed:
        kernel((1,), X, **constants)
    choices.write()
    return timed


def launched(function: Function, kernel: GpuKernel, **constants: Any) -> int:
    kernel((1,), X, **constants)
    return function.tiles[-1]


def test_a_choice_is_kept_for_its_kind_of_device(tmp_path: Path, gpu: dict[str, Any]) -> None:
    function = Function()
    kernel = GpuKernel(function, SMALL, LARGE)
    set_chooser(TunedChooser(tmp_path))
    assert launched(function, kernel, BLOCK=1) == 16
    (timed,) = tune(tmp_path, kernel, Clock(function, {16: 3.0, 64: 2.0}), BLOCK=1)
    assert list(timed.seconds.values()) == [3.0, 2.0]
    set_chooser(TunedChooser(tmp_path))  # as a later process does
    assert launched(function, kernel, BLOCK=1) == 64
    assert launched(function, kernel, BLOCK=2) == 16  # a call that was not timed
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("NVIDIA-Made-Up-80GB-9.0-triton-")
    gpu["name"] = "NVIDIA Other"
    set_chooser(TunedChooser(tmp_path))
    assert launched(function, kernel, BLOCK=1) == 16


@pytest.mark.usefixtures("gpu")
def test_what_ships_is_launched_where_a_choice_cannot_be_used(tmp_path: Path) -> None:
    function = Function()
    kernel = GpuKernel(function, SMALL, LARGE)
    tune(tmp_path, kernel, Clock(function, {16: 3.0, 64: 2.0}))
    path = choices_path(X.device, tmp_path)
    good = path.read_text()
    for text in (good.replace("64", "32"), "{", "[]", '{"a": 1}', "x" * (5 << 20)):
        path.write_text(text)
        set_chooser(TunedChooser(tmp_path))
        assert launched(function, kernel) == 16
    # A kernel whose configurations have changed is another one.
    path.write_text(good)
    set_chooser(TunedChooser(tmp_path))
    other = GpuKernel(function, Config(constants={"TILE": 8}), LARGE)
    assert launched(function, other) == 8


def test_the_environment_turns_choices_off(
    tmp_path: Path, gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    function = Function()
    kernel = GpuKernel(function, SMALL, LARGE)
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path))
    tune(tmp_path / "tuned", kernel, Clock(function, {16: 3.0, 64: 2.0}))
    for value, tile in (("1", 64), ("0", 16)):
        monkeypatch.setenv("MOTET_TUNED", value)
        use_tuned()
        assert launched(function, kernel) == tile


@pytest.mark.usefixtures("gpu")
def test_tuning_goes_on_behind_what_was_chosen(tmp_path: Path) -> None:
    function = Function()
    kernel, clock = GpuKernel(function, SMALL, LARGE), Clock(function, {16: 3.0, 64: 2.0})
    tune(tmp_path, kernel, clock, BLOCK=1)
    choices = Choices.read(choices_path(X.device, tmp_path))
    with tuning(choices, clock, never) as timed:
        kernel((1,), X, BLOCK=1)
        kernel((1,), X, BLOCK=2)
    assert ["BLOCK=2" in run.call for run in timed] == [True]
    with tuning(choices, clock, lambda: True) as timed:
        kernel((1,), X, BLOCK=3)
    assert timed == []
    assert function.tiles[-1] == 16


@pytest.mark.usefixtures("gpu")
def test_a_configuration_that_the_device_refuses_is_left_out(tmp_path: Path) -> None:
    function = Function()
    kernel, clock = GpuKernel(function, SMALL, LARGE), Clock(function, {16: 3.0})
    function.refused = {64}
    (timed,) = tune(tmp_path, kernel, clock)
    assert list(timed.seconds) == [str(SMALL)]
    function.refused = {16}
    with pytest.raises(RuntimeError):
        tune(tmp_path / "other", kernel, clock)


def test_of_several_calls_the_mean_ratio_decides() -> None:
    """The bits of a row must not depend on the rows of its batch, so all of them share a choice."""

    def timed(**seconds: float) -> Timed:
        return Timed("call", seconds)

    few, many = timed(ships=1.0, other=3.0), timed(ships=100.0, other=50.0)
    assert (fastest([few]), fastest([many]), fastest([few, many])) == ("ships", "other", "ships")
    assert fastest([timed(ships=1.0, other=1.5), many]) == "other"
    assert fastest([timed(ships=1.0), many]) == "ships"
