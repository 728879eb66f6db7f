"""Reload the tenants file when it changes. An invalid file is logged and changes nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from motet_shared.errors import ConfigError
from motet_shared.tenants import Tenants, load_tenants

log = logging.getLogger(__name__)

_POLL_INTERVAL = 1.0  # seconds
_Stamp = tuple[int, int, int]


class TenantsFile:
    """Watch the file at `path`; `use` receives its tenants each time the file changes."""

    def __init__(self, path: Path, use: Callable[[Tenants], None]):
        self._path, self._use = path, use
        self._seen = self._stamp()

    async def watch(self) -> None:
        """Check for changes once a second, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_INTERVAL)
            if await asyncio.to_thread(self.changed):
                self.read()

    def changed(self) -> bool:
        """Return True if modification time, size or inode differ from the last check."""
        before, self._seen = self._seen, self._stamp()
        return self._seen != before

    def read(self) -> None:
        """Load the file and pass on its tenants; an error is logged."""
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
