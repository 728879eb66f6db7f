"""Keep the fastest configuration of each kernel and call, in one file per kind of device.

`tuning` times the candidates of every call within its context and notes the fastest. A service only
reads what was noted; without a file, or for a call that was not timed, the configuration that ships
is launched. Files are in `tuned` under `MOTET_CACHE`, named by the GPU, its compute capability and
Triton's version; `MOTET_TUNED=0` leaves them unread.

A choice depends on types and constants, never on the number of rows: the bits of a row must not
depend on the others of its batch. Of several calls that share one, the mean ratio to what ships decides.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from motet_kernels.gpu.launch import Config, Constants, GpuKernel, Grid, choosing, set_chooser
from motet_kernels.runtime.build import cache_root

log = logging.getLogger(__name__)

Timer = Callable[[Callable[[], None]], float]
Key = tuple[Any, ...]
_MOST_BYTES = 4 << 20  # of a file that is read


@dataclass
class Choices:
    """Hold the name of the fastest configuration by kernel and call, for one kind of device."""

    path: Path
    names: dict[str, str] = field(default_factory=dict)
    _configs: dict[Key, Config] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, path: Path) -> Choices:
        """Return the choices of a file; none of one that is missing or cannot be read."""
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise ValueError(f"more than {_MOST_BYTES} bytes")
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or not all(
                isinstance(one, str) for one in found.values()
            ):
                raise ValueError("no object of strings")
        except FileNotFoundError:
            found = {}
        except (OSError, ValueError) as error:
            log.warning("%s is not read: %s; delete it", path, error)
            found = {}
        return cls(path, found)

    def config(self, kernel: GpuKernel, args: Sequence[Any], constants: Constants) -> Config:
        """Return the configuration for a call: what was noted if the kernel has it, else what ships."""
        key = _key(kernel, args, constants)
        found = self._configs.get(key)
        if found is None:
            candidates = list(kernel.candidates(constants))
            name = self.names.get(_text(key))
            found = next((one for one in candidates if str(one) == name), candidates[0])
            self._configs[key] = found
        return found

    def note(self, call: str, name: str) -> None:
        """Note the name of the fastest configuration of a call."""
        self.names[call] = name
        self._configs.clear()

    def write(self) -> None:
        """Write the file, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=self.path.parent, encoding="utf-8", delete=False
        ) as file:
            json.dump(self.names, file, indent=0, sort_keys=True)
        os.replace(file.name, self.path)


@dataclass(frozen=True)
class Timed:
    """Hold one call that was timed: seconds by configuration, that which ships first."""

    call: str
    seconds: dict[str, float]


def fastest(runs: Sequence[Timed]) -> str:
    """Return the configuration with the least geometric mean of ratios to the one that ships.

    One that a call of them could not launch is no candidate.
    """
    able = [name for name in runs[0].seconds if all(name in run.seconds for run in runs)]
    shipped = able[0]

    def ratio(name: str) -> float:
        return sum(math.log(run.seconds[name] / run.seconds[shipped]) for run in runs)

    return min(able, key=ratio)


def device_key(device: torch.device) -> str:
    """Return the name of a kind of GPU, for a file: model, compute capability, Triton's version."""
    major, minor = torch.cuda.get_device_capability(device)
    try:
        triton = version("triton")
    except PackageNotFoundError:  # a vendor's build has another name
        triton = "unknown"
    name = f"{torch.cuda.get_device_name(device)} {major}.{minor} triton {triton}"
    return re.sub(r"[^\w.]+", "-", name)


def choices_path(device: torch.device, folder: Path | None = None) -> Path:
    """Return the file of a device's choices."""
    return (folder or cache_root() / "tuned") / f"{device_key(device)}.json"


class TunedChooser:
    """Choose for launches what was noted for their device; files are read once."""

    def __init__(self, folder: Path | None = None):
        self._folder = folder
        self._by_device: dict[torch.device, Choices] = {}

    def __call__(self, kernel: GpuKernel, args: Sequence[Any], constants: Constants) -> Config:
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        choices = self._by_device.get(device)
        if choices is None:
            choices = Choices.read(choices_path(device, self._folder))
            self._by_device[device] = choices
        return choices.config(kernel, args, constants)


def use_tuned() -> None:
    """Have launches on GPUs take what was noted, unless `MOTET_TUNED` is 0."""
    set_chooser(None if os.environ.get("MOTET_TUNED") == "0" else TunedChooser())


@contextmanager
def tuning(choices: Choices, timer: Timer, deadline: Callable[[], bool]) -> Iterator[list[Timed]]:
    """Time the candidates of each call within the context, unless it had a choice at the beginning.

    timer: returns the seconds of a run. deadline: True once no further call is to be timed. Yields a
    list that grows with what was timed. A configuration that the device refuses is left out; the one
    that ships is launched first, and its errors are raised.
    """
    done: list[Timed] = []
    known = frozenset(choices.names)

    def choose(
        kernel: GpuKernel, grid: Grid, args: tuple[Any, ...], constants: Constants
    ) -> Config:
        candidates = list(kernel.candidates(constants))
        call = _text(_key(kernel, args, constants))
        if len(candidates) < 2 or call in known or deadline():
            return candidates[0]
        seconds: dict[str, float] = {}
        for config in candidates:
            try:
                seconds[str(config)] = timer(
                    lambda config=config: kernel.run(config, grid, *args, **constants)  # type: ignore[misc]
                )
            except RuntimeError as error:  # such as too little shared memory
                if not seconds:
                    raise
                log.info("%s: %s is left out: %s", kernel.name, config, error)
        done.append(Timed(call, seconds))
        choices.note(call, fastest([run for run in done if run.call == call]))
        return candidates[0]

    with choosing(choose):
        yield done


def _key(kernel: GpuKernel, args: Sequence[Any], constants: Constants) -> Key:
    """Return what a choice depends on: the kernel, the types of tensors, and the constants.

    A function may have several kernels, with other configurations each.
    """
    types = (arg.dtype for arg in args if isinstance(arg, Tensor))
    return kernel, *types, *constants.items()


def _text(key: Key) -> str:
    kernel, *rest = key
    parts = (f"{one[0]}={one[1]}" if isinstance(one, tuple) else str(one) for one in rest)
    configs = f"of {len(kernel.configs)} from {kernel.configs[0]}"
    return " ".join([kernel.name, *parts, configs]).replace("torch.", "")
