"""Report the progress of a download in bytes, through huggingface_hub's progress bars."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

Report = Callable[[int, int], None]  # takes the bytes that are there, and those of all files
EVERY = 0.25  # seconds between two reports


def progress_bar(report: Report) -> type[Any]:
    """Return a class of progress bars that draw nothing and report bytes.

    huggingface_hub has one bar for bytes that are received and one for bytes that are written; of
    both, the one that is ahead is reported.
    """
    bars: list[Any] = []
    last = 0.0

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs | {"file": _Nowhere(), "disable": False})
            if self.unit == "B":
                bars.append(self)

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal last
            found: bool | None = super().update(n)
            if self.unit == "B" and time.monotonic() - last >= EVERY:
                last = time.monotonic()
                report(int(max(bar.n for bar in bars)), int(max(bar.total or 0 for bar in bars)))
            return found

    return Bar


class _Nowhere:
    """Take what a bar would draw."""

    def write(self, _text: str) -> None:
        pass

    def flush(self) -> None:
        pass
