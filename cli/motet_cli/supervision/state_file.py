"""Write what a supervisor runs into a JSON file, for other programs (`--state-file`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


class WriteWarning:
    """Report that a file cannot be written: once, until it can be again."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        """Configure where messages go, with their level."""
        self._report, self._failed = report, False

    @contextmanager
    def on_failure(self, describe: Callable[[OSError], str]) -> Iterator[None]:
        """Report an OSError of the block, in the words of `describe`, instead of raising it."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                self._report(describe(error), "warning")
            self._failed = True
        else:
            self._failed = False


class StateFile:
    """Keep a file up to date; the processes go on if it cannot be written."""

    def __init__(self, path: Path, report: Callable[[str, str], None]) -> None:
        """Configure the file without writing it.

        report: receives a message and its level if the file cannot be written.
        """
        self._path, self._warning = path, WriteWarning(report)

    def write(self, state: Mapping[str, object]) -> None:
        """Replace the file at once: a reader sees the old one or the new one."""
        part = self._path.with_name(self._path.name + ".part")
        with self._warning.on_failure(self._described):
            part.write_text(json.dumps(state, indent=1))
            part.replace(self._path)

    def _described(self, error: OSError) -> str:
        return (
            f"--state-file: cannot write {self._path}: {error}; free space there, or give a"
            " writable path"
        )
