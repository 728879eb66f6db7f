"""Commands at a pseudo-terminal, and beside one."""

from __future__ import annotations

import codecs
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from types import TracebackType

from e2e.stack import WAIT_SECONDS


class Terminal:
    """A command at a terminal: what is typed, and what is seen."""

    def __init__(self, *command: str, env: Mapping[str, str] | None = None) -> None:
        ours, theirs = pty.openpty()
        self._fd = ours
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=env or environment(),
        )
        os.close(theirs)
        self.seen = ""
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        """What a terminal does on Ctrl-C."""
        self.process.send_signal(2)

    def expect(self, *words: str, seconds: float = WAIT_SECONDS) -> str:
        """What was seen up to and with the first of `words`; it is not seen again."""
        give_up = time.monotonic() + seconds
        while not (found := [word for word in words if word in self.seen]):
            if not self._read(give_up, f"none of {words}"):
                raise EOFError(f"none of {words} in {self.seen!r}")
        before, _, self.seen = self.seen.partition(found[0])
        return before + found[0]

    def wait(self, seconds: float = WAIT_SECONDS) -> int:
        """Read the rest into `seen` until no process has the terminal open; return the command's exit code.

        Raises TimeoutError if that takes longer than `seconds`.
        """
        give_up = time.monotonic() + seconds
        while self._read(give_up, "no end of the output"):
            pass
        return self.process.wait(max(0.0, give_up - time.monotonic()))

    def _read(self, give_up: float, missing: str) -> bool:
        """Add what comes next to `seen`; return False at the end.

        Raises TimeoutError if nothing comes before `give_up`.
        """
        if not select.select([self._fd], [], [], max(0.0, give_up - time.monotonic()))[0]:
            raise TimeoutError(f"{missing} in {self.seen!r}")
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # EIO: the command has ended
            return False
        self.seen += self._decode(data).replace("\r\n", "\n")
        return bool(data)


def environment() -> dict[str, str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": paths, "TERM": "dumb"}


def motet(url: str, command: str, *args: str) -> list[str]:
    return [sys.executable, "-m", "motet_cli", command, "--url", url, *args]
