"""Write one log of the whole stack, with a prefix and a colour per process."""

from __future__ import annotations

import json
import queue
import re
import threading
import time
import zlib
from collections.abc import Callable
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]

_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_OWN = "motet"  # name of the supervisor's own lines
_BACKLOG = 20_000  # lines
# nats-server: "[pid] 2026/01/01 10:00:00.000000 [INF] text". Its [INF] lines are not shown.
_NATS_LINE = re.compile(r"^\[\d+\] \S+ \S+ \[(?P<level>[A-Z]{3})\] (?P<text>.*)$")
_NATS_SHOWN = {"WRN": "warning", "ERR": "error", "FTL": "error"}
# Expected: only this user can read the passwords' files, all our clients begin with TLS, and the
# supervisor looks whether the port is open.
_NATS_KNOWN = re.compile(
    r"Plaintext passwords detected|Clients that are not using|\S+ - cid:\d+ - TLS handshake error: EOF$"
)


class Log:
    """Write lines of many processes to one stream, on a thread of its own.

    A paused terminal (Ctrl-S) or a hanging reader must not block the services through their pipes:
    beyond a backlog, lines are dropped and counted.
    """

    def __init__(
        self, out: TextIO, *, fmt: LogFormat = "text", colour: bool = False, live: bool = False
    ) -> None:
        """Start the writer thread.

        live: `out` is a terminal, on which a progress line is redrawn in place.
        """
        self.live = live and fmt == "text"
        self._out, self._fmt, self._colour = out, fmt, colour
        self._width = len(_OWN)
        self._progress = ""
        # Each entry is a line, and the progress line below it.
        self._lines: queue.Queue[tuple[str, str] | None] = queue.Queue(_BACKLOG)
        self._dropped = 0
        self._writer = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._writer.start()

    def reserve(self, names: list[str]) -> None:
        """Widen the prefix column for these names."""
        self._width = max([self._width, *map(len, names)])

    def child(self, name: str, role: str, line: str) -> None:
        """Log a line that a process printed."""
        level = "info"
        if role == "nats" and (match := _NATS_LINE.match(line)):
            if match["level"] not in _NATS_SHOWN or _NATS_KNOWN.match(match["text"]):
                return
            level, line = _NATS_SHOWN[match["level"]], match["text"]
        if self._fmt == "text":
            self._put(f"{self._prefix(name)} {line}")
        else:
            self._put(line if line.startswith("{") else self._json(name, level, line))

    def printed_by(self, name: str, role: str) -> Callable[[str], None]:
        """Return the function that logs the lines of a process."""
        return lambda line: self.child(name, role, line)

    def note(self, text: str, level: str = "info") -> None:
        """Log a line of the supervisor itself."""
        if self._fmt == "text":
            mark = {"warning": "33", "error": "31"}.get(level, "1")
            self._put(f"{self._prefix(_OWN)} {self._paint(text, mark)}")
        else:
            self._put(self._json(_OWN, level, text))

    def progress(self, text: str) -> None:
        """Set the progress line; an empty text removes it. Has no effect without a terminal."""
        if self.live and text != self._progress:
            self._progress = text
            self._put("")

    def close(self, timeout: float = 2.0) -> None:
        """Write the queued lines, as far as the stream accepts them within `timeout` seconds."""
        self.progress("")
        try:
            self._lines.put(None, timeout=timeout)
        except queue.Full:
            return
        self._writer.join(timeout)

    def _prefix(self, name: str) -> str:
        colour = 1 if name == _OWN else _COLOURS[zlib.crc32(name.encode()) % len(_COLOURS)]
        return self._paint(f"{name:>{self._width}} │", str(colour))

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text

    @staticmethod
    def _json(name: str, level: str, text: str) -> str:
        return json.dumps(
            {"time": time.time(), "level": level, "process": name, "message": text},
            ensure_ascii=False,
        )

    def _put(self, line: str) -> None:
        try:
            self._lines.put_nowait((line, self._progress))
        except queue.Full:
            self._dropped += 1

    def _write_all(self) -> None:
        shown = ""
        while (entry := self._lines.get()) is not None:
            line, progress = entry
            if self._dropped:
                line, self._dropped = f"… {self._dropped} lines dropped\n{line}", 0
            wipe = "\r\x1b[K" if shown else ""
            shown = progress
            try:
                self._out.write(wipe + (line + "\n" if line else "") + shown)
                self._out.flush()
            except (OSError, ValueError):  # the stream is closed; the services must continue
                shown = ""
