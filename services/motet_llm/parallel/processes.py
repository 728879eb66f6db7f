"""Start the processes of a group's ranks, and end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from .commands import Report
from .link import Link, pair

_ENDS_WITHIN = 5.0  # seconds until a rank that does not end by itself is killed
# Variables of the environment that a rank needs; the others may be secrets.
_KEPT = ("MOTET_CACHE", "MOTET_NATIVE", "MOTET_HELPER")


class RankProcess:
    """Run one rank as a child process. It ends when its link is closed, also by the leader's end."""

    def __init__(self, number: int):
        self.number = number
        own, its = pair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "motet_llm.parallel", str(its)],
                pass_fds=(its,),
                stdin=subprocess.DEVNULL,
                env=_environment(os.environ),
            )
        finally:
            os.close(its)
        self.link: Link[Report] = Link(own, Report)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> str:
        """Return how the process ended; empty: it runs."""
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return ""
        if status < 0:
            return f"(process {self.pid}) was ended by {signal.Signals(-status).name}"
        return f"(process {self.pid}) ended with status {status}"

    def close(self) -> None:
        """End the process, and wait for its end."""
        self.link.shutdown()
        try:
            self._process.wait(timeout=_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in given.items()
        if name in _KEPT or not name.startswith("MOTET_")
    }
