"""Write what a supervisor runs into a JSON file, for other programs (`--state-file`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path


class StateFile:
    """Keep a file up to date; the processes go on if it cannot be written."""

    def __init__(self, path: Path, report: Callable[[str, str], None]) -> None:
        """Configure the file without writing it.

        report: receives a message and its level if the file cannot be written.
        """
        self._path, self._report = path, report
        self._failed = False

    def write(self, state: Mapping[str, object]) -> None:
        """Replace the file at once: a reader sees the old one or the new one."""
        part = self._path.with_name(self._path.name + ".part")
        try:
            part.write_text(json.dumps(state, indent=1))
            part.replace(self._path)
        except OSError as error:
            if not self._failed:
                self._report(
                    f"--state-file: cannot write {self._path}: {error}; free space there, or give a"
                    " writable path",
                    "warning",
                )
            self._failed = True
        else:
            self._failed = False
