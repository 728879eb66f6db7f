"""Record what clients ask and are told, a line of JSON each, while they are told it."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

Told = Callable[[float], None]


@dataclass
class Request:
    """Hold one request of a client. `pieces`: when a part of its answer came, and how much there was by then."""

    number: int
    pieces: list[tuple[float, float]] = field(default_factory=list)

    def told(self, units: float) -> None:
        """Note that so much has come of the answer: characters of text, or seconds of sound."""
        self.pieces.append((round(time.monotonic(), 4), units))


class History:
    """Write the lines of all clients to one file.

    A request has a line when it is asked, and one when it is over: with a digest of its answer, or
    with the code of its error and the text that had come before.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._numbers = itertools.count()

    def asked(self, kind: str, variant: int, *, quiet: bool) -> Request:
        """Note a request; in a `quiet` time answers define what is due."""
        request = Request(next(self._numbers))
        self._write(asked=request.number, kind=kind, variant=variant, quiet=quiet)
        return request

    def answered(self, request: Request, answer: Any) -> None:
        """Note a whole answer."""
        data = answer if isinstance(answer, bytes) else repr(answer).encode()
        digest = hashlib.sha256(data).hexdigest()
        text = answer if isinstance(answer, str) and len(answer) < 4096 else None
        self._over(request, digest=digest, length=len(data), text=text)

    def failed(self, request: Request, code: str, text: str | None, *, retryable: bool) -> None:
        """Note an error, and what had come of a text before it."""
        self._over(request, error=code, text=text, retryable=retryable)

    def close(self) -> None:
        self._file.close()

    def _over(self, request: Request, **fields: Any) -> None:
        self._write(answered=request.number, pieces=request.pieces, **fields)

    def _write(self, **fields: Any) -> None:
        self._file.write(json.dumps({"at": round(time.monotonic(), 4), **fields}) + "\n")
        self._file.flush()
