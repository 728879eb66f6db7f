"""Mask the tokens that the rows of a step may draw, where their requests are held to grammars.

The masks are computed while the model computes the logits that they apply to: `compute` and `bits`
are called by different threads, and `bits` waits. Shapes: R rows, V vocabulary, W words of 32 bits,
the lowest token first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from motet_kernels.spans import upload
from motet_llm.speculation.speculative_row import Row, SpeculativeRow

from .grammar import GrammarState, mask_words


class TokenMask:
    """Compute the mask of one step's rows, whose logits are on `device`.

    `seconds`: the time that it took.
    """

    def __init__(self, requests: Sequence[Row], vocab: int, device: torch.device):
        self._constrained = [
            (row, request)
            for row, request in enumerate(requests)
            if request.grammar_state is not None
        ]
        self._rows = len(requests)
        self._vocab = vocab
        self._device = device
        self._mask = torch.empty(0)
        self._done = threading.Event()
        self.seconds = 0.0

    @property
    def empty(self) -> bool:
        """Return True if no row is held to a grammar."""
        return not self._constrained

    def compute(self) -> None:
        """Compute the masks of all rows; return at once if none is held to a grammar."""
        began = time.perf_counter()
        try:
            if self._constrained:
                self._mask = self._compute_mask()
        finally:
            self.seconds = time.perf_counter() - began
            self._done.set()

    def _compute_mask(self) -> Tensor:
        bits_RW = np.full((self._rows, mask_words(self._vocab)), 0xFFFFFFFF, np.uint32)
        ahead: GrammarState | None = None
        for row, request in self._constrained:
            ahead = _next(ahead, request)
            if ahead is not None:
                ahead.fill(bits_RW[row], request.stop_ids)
        return torch.from_numpy(bits_RW.view(np.int32))

    def bits(self) -> Tensor | None:
        """Return the mask `[R, W]` for `motet_kernels.sampling.sampling.draw`, or None if no row is held.

        Waits until `compute` is done.
        """
        if self.empty:
            return None
        self._done.wait()
        return upload(self._mask, self._device)


def _next(before: GrammarState | None, row: Row) -> GrammarState | None:
    """Return the grammar state at a row; `before` is the state at the row before it.

    None where the draft has left the grammar: tokens drawn there are discarded.
    """
    if not isinstance(row, SpeculativeRow):
        return row.grammar_state
    if before is None:
        return None
    if len(row.ahead) == 1:
        before = before.copy()  # the draft may be wrong: the request's own state must not change
    return before if before.accept(row.ahead[-1:]) else None
