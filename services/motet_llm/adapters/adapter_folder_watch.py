"""Serve the adapters that appear in a worker's adapter folder while it runs, and drop those that leave.

Each subfolder, or link to one, is an adapter; names with characters that no file name has are
percent-encoded. A folder is looked at twice a second, its files are read on a thread, and the bank
changes between two steps. Requests that run with an adapter that has left are finished with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from motet_shared.errors import BadRequest

from .adapter_cache import AdapterCache
from .bank import AdapterBank, list_adapters
from .folder import CONFIG, WEIGHTS, AdapterFolder

log = logging.getLogger(__name__)

PERIOD = 0.5  # seconds
State = tuple[str, int, int]  # resolved path, and when its two files were changed
ChangeBank = Callable[[Callable[[], bool]], Awaitable[None]]


class AdapterFolderWatch:
    """Keep a bank and its cache as a folder says.

    taken: names that adapters of the folder cannot have: the model's, and those of other adapters.
    change_bank: runs a function between two steps; it returns True if factors have moved in memory.
    """

    def __init__(
        self,
        folder: Path,
        taken: Collection[str],
        bank: AdapterBank,
        cache: AdapterCache,
        change_bank: ChangeBank,
    ):
        self._folder, self._taken = folder, frozenset(taken)
        self._bank, self._cache = bank, cache
        self._change_bank = change_bank
        self._states = self._look()
        self._elapsed = 0.0
        self._changing: asyncio.Task[None] | None = None

    async def tick(self, elapsed: float) -> None:
        """Look at the folder if it is time; changes are carried out by a task of their own."""
        self._elapsed += elapsed
        if self._elapsed < PERIOD or (self._changing is not None and not self._changing.done()):
            return
        self._elapsed = 0.0
        states = self._look()
        if states != self._states:
            self._changing = asyncio.create_task(self._change(self._states, states))
            self._states = states

    def _look(self) -> dict[str, State]:
        found: dict[str, State] = {}
        for name, path in list_adapters(self._folder).items():
            if name in self._taken:
                continue
            try:
                changed = [(path / file).stat().st_mtime_ns for file in (CONFIG, WEIGHTS)]
            except OSError:  # not whole yet
                continue
            found[name] = (str(path.resolve()), changed[0], changed[1])
        return found

    async def _change(self, before: dict[str, State], after: dict[str, State]) -> None:
        for name in before.keys() - after.keys():
            await self._drop(name)
        for name in after.keys() - before.keys():
            await self._serve(name, Path(after[name][0]))
        for name in before.keys() & after.keys():
            if before[name] != after[name]:
                await self._drop(name)
                await self._serve(name, Path(after[name][0]))

    async def _drop(self, name: str) -> None:
        await self._change_bank(lambda: self._remove(name))
        await self._cache.forget(name)
        log.info("adapter dropped", extra={"adapter": name})

    def _remove(self, name: str) -> bool:
        self._bank.remove(name)
        return False

    async def _serve(self, name: str, path: Path) -> None:
        found: AdapterFolder | BadRequest = await asyncio.to_thread(self._bank.read, name, path)
        await self._change_bank(lambda: self._bank.add(name, found))
        self._cache.refresh()

    def close(self) -> None:
        """End a change that is being carried out."""
        if self._changing is not None:
            self._changing.cancel()
