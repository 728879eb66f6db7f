"""Which tokens the rows of a step may draw, where their requests are held to grammars.

The masks are computed while the model computes the logits that they are for: `compute` and `apply` are called by
different threads, and `apply` waits. Shapes: R rows, V vocabulary, W words of 32 bits, the lowest token first.
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
        """For the CPU a bool of each logit, so that less is left for the thread that has the logits; else bits."""
        bits_RW = np.full((self._rows, words(self._vocab)), 0xFFFFFFFF, np.uint32)
        ahead: Sentence | None = None
        for row, request in self._held:
            ahead = _next(ahead, request)
            if ahead is not None:
                ahead.fill(bits_RW[row], request.stop_ids)
        if self._device.type != "cpu":
            return torch.from_numpy(bits_RW.view(np.int32))
        return torch.from_numpy(np.unpackbits(bits_RW.view(np.uint8), axis=1, bitorder="little") == 0)

    def apply(self, logits_RV: Tensor) -> Tensor:
        """The logits, those of tokens that may not be drawn at -inf, as soon as the masks are there."""
        if self.empty:
            return logits_RV
        self._done.wait()
        if self._mask.dtype == torch.bool:
            return logits_RV.masked_fill(self._mask[:, : logits_RV.shape[1]], -torch.inf)
        return forbid(logits_RV, upload(self._mask, self._device))


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


def forbid(logits_RV: Tensor, bits_RW: Tensor) -> Tensor:
    """A copy of the logits with -inf where the token's bit, in int32, is not set."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits_RV.device)
    allowed_RV = (bits_RW.unsqueeze(-1) >> shifts).bitwise_and_(1).view(len(bits_RW), -1)[:, : logits_RV.shape[1]]
    return logits_RV.masked_fill(allowed_RV == 0, -torch.inf)
