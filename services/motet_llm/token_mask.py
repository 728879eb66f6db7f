"""Which tokens the rows of a step may draw, where their requests are held to grammars.

The masks are computed while the model computes the logits that they are for: `compute` and `bits` are called by
different threads, and `bits` waits. Shapes: R rows, V vocabulary, W words of 32 bits, the lowest token first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from motet_kernels.spans import upload

from .grammar import Sentence, words
from .supposed import Row, Supposed


class TokenMask:
    """Of the rows of one step, whose logits are on `device`. `seconds`: what it took to compute."""

    def __init__(self, requests: Sequence[Row], vocab: int, device: torch.device):
        self._held = [(row, request) for row, request in enumerate(requests) if request.sentence is not None]
        self._rows = len(requests)
        self._vocab = vocab
        self._device = device
        self._mask = torch.empty(0)
        self._done = threading.Event()
        self.seconds = 0.0

    @property
    def empty(self) -> bool:
        """No row is held to a grammar."""
        return not self._held

    def compute(self) -> None:
        """Ask the grammars; at once if there are none."""
        began = time.perf_counter()
        try:
            if self._held:
                self._mask = self._ask()
        finally:
            self.seconds = time.perf_counter() - began
            self._done.set()

    def _ask(self) -> Tensor:
        bits_RW = np.full((self._rows, words(self._vocab)), 0xFFFFFFFF, np.uint32)
        ahead: Sentence | None = None
        for row, request in self._held:
            ahead = _next(ahead, request)
            if ahead is not None:
                ahead.fill(bits_RW[row], request.stop_ids)
        return torch.from_numpy(bits_RW.view(np.int32))

    def bits(self) -> Tensor | None:
        """As `motet_kernels.sampling.draw` takes them, `[R, W]`, as soon as they are there; None if no row is held."""
        if self.empty:
            return None
        self._done.wait()
        return upload(self._mask, self._device)


def _next(before: Sentence | None, row: Row) -> Sentence | None:
    """Where the grammar of a row is; `before`: that of the row before it. None where its draft has left the grammar:
    nothing that is drawn there counts."""
    if not isinstance(row, Supposed):
        return row.sentence
    if before is None:
        return None
    if len(row.ahead) == 1:
        before = before.copy()  # it may be wrong, and the request's own has not seen it
    return before if before.accept(row.ahead[-1:]) else None
