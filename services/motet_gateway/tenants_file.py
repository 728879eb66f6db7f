"""Reads the file of tenants again when it changes. A broken one is told, and changes nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from motet_shared.errors import ConfigError
from motet_shared.tenants import Tenants, load_tenants

log = logging.getLogger(__name__)

_LOOK_EVERY = 1.0  # seconds
_Stamp = tuple[int, int, int]


class TenantsFile:
    """The file at `path`; `use` gets what it says, each time that it says something else."""

    def __init__(self, path: Path, use: Callable[[Tenants], None]):
        self._path, self._use = path, use
        self._seen = self._stamp()

    async def watch(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            if await asyncio.to_thread(self.changed):
                self.read()

    def changed(self) -> bool:
        """Whether it is another file than at the last look, by time, size and place."""
        before, self._seen = self._seen, self._stamp()
        return self._seen != before

    def read(self) -> None:
        """Take over what it says now."""
        try:
            tenants = load_tenants(self._path)
        except ConfigError as error:
            log.error("%s; what was read before stays in force", error.message)
            return
        self._use(tenants)
        log.info("tenants: %d, keys: %d", len(tenants.limits), len(tenants.keys))

    def _stamp(self) -> _Stamp | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
