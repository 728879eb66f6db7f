"""Keep processes of models that are not loaded, prepared up to the point where they take memory.

Such a process has read the configuration, is connected to NATS and has made the model's modules; it
waits at a gate (`memory_turn`) for its model to be wanted. Until then the supervisor does not know
of it: it is no part of the stack.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from motet_cli.supervision.child import Child, ChildSpec
from motet_cli.supervision.supervisor import Supervisor
from motet_shared.process.memory_turn import Gate

FilesState = frozenset[tuple[str, int, int]]


def state_of(folder: Path) -> FilesState:
    """Return names, sizes and times of change of a folder's files; empty if it cannot be read."""
    try:
        states = [(path.name, path.stat()) for path in folder.iterdir()]
    except OSError:
        return frozenset()
    return frozenset((name, state.st_size, state.st_mtime_ns) for name, state in states)


@dataclass
class _Prepared:
    """Hold a model's processes with their gates.

    files: that they have read. is_wanted: they are to wait here; none is to end by itself.
    """

    files: FilesState
    processes: list[tuple[Child, Gate]]
    is_wanted: bool = True

    def open(self, exits: Sequence[str]) -> bool:
        """Open all gates; return False if a process has just ended."""
        try:
            for _, gate in self.processes:
                gate.open(exits)
        except OSError:
            return False
        return True

    async def end(self) -> None:
        self.is_wanted = False
        await asyncio.gather(*(child.kill() for child, _ in self.processes))


class PreparedModels:
    """Hold the prepared processes of at most `limit` models."""

    def __init__(self, supervisor: Supervisor, limit: int) -> None:
        self.limit = limit
        self._supervisor = supervisor
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._models: dict[str, _Prepared] = {}
        self._failed: dict[str, FilesState] = {}  # whose processes ended by themselves
        self._made = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def __contains__(self, model: str) -> bool:
        return model in self._models

    def __len__(self) -> int:
        return len(self._models)

    def has_failed(self, model: str, files: Callable[[], FilesState]) -> bool:
        """Return True if a process of a model ended by itself, and would again: its files are the same."""
        return model in self._failed and self._failed[model] == files()

    async def add(self, model: str, specs: Sequence[ChildSpec], files: FilesState) -> None:
        """Start the processes of a model, whose files are as `files` says.

        Raises NotForked or OSError.
        """
        made = _Prepared(files, [])
        self._failed.pop(model, None)
        try:
            for spec in specs:
                gate = Gate(self._next_path())
                try:
                    child = await self._start(spec, gate)
                except BaseException:
                    gate.close()
                    raise
                made.processes.append((child, gate))
                self._watch(model, made, child, gate)
        except BaseException:
            await made.end()
            raise
        if model in self._failed:  # one ended while another was forked
            await made.end()
        else:
            self._models[model] = made

    def take(self, model: str, exits: Sequence[str], files: FilesState) -> bool:
        """Hand the processes of a model to the supervisor; return False if it has none.

        They take memory once the processes `exits` have ended. Those that have read other files than
        `files` are ended instead.
        """
        taken = self._models.pop(model, None)
        if taken is None:
            return False
        taken.is_wanted = False
        if taken.files != files or not taken.open(exits):
            self._run(taken.end(), f"end {model}")
            return False
        for child, _ in taken.processes:
            self._supervisor.admit(child)
        return True

    async def drop(self, model: str) -> None:
        """End the processes of a model, if it has any."""
        if (made := self._models.pop(model, None)) is not None:
            await made.end()

    async def clear(self) -> None:
        """End all processes, as after a change of the code or of settings that they have read."""
        self._failed.clear()
        await asyncio.gather(*map(self.drop, [*self._models]))

    async def close(self) -> None:
        """End all processes and remove the gates, also of those that were taken."""
        await self.clear()
        for task in self._tasks:
            task.cancel()
        if self._folder is not None:
            self._folder.cleanup()

    def _next_path(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="motet-gates-")
        self._made += 1
        return Path(self._folder.name) / str(self._made)

    async def _start(self, spec: ChildSpec, gate: Gate) -> Child:
        env = {**spec.env, "MOTET_MEMORY_GATE": str(gate.path)}
        child = await self._supervisor.fork_aside(replace(spec, env=env))
        child.spec = spec  # by which it is started again
        return child

    def _watch(self, model: str, made: _Prepared, child: Child, gate: Gate) -> None:
        """Close a gate at the end of its process, and give up the model if that was not wanted yet."""

        async def watch() -> None:
            try:
                await child.wait()
            finally:
                gate.close()
            if made.is_wanted:
                self._failed[model] = made.files
                await (self.drop(model) if self._models.get(model) is made else made.end())

        self._run(watch(), f"prepared {child.spec.name}")

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
