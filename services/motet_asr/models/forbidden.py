"""Mask forbidden tokens in logits: range by range on a CPU, with one mask for all rows on a GPU.

B rows · R ranges of a row · V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.runtime.device import upload_all

NEVER = float("-inf")
Ranges = Sequence[tuple[int, int]]  # of tokens: first inclusive, last exclusive
_MOST = 3  # most ranges of a row


class Forbidden(ABC):
    """Mask tokens that may not be sampled.

    never: tokens that are always forbidden.
    not_first: tokens that are forbidden at the beginning.
    first_time: the first timestamp token; all later ones are timestamps too.
    """

    def __init__(self, never: Sequence[int], not_first: Sequence[int], first_time: int, vocab: int):
        self._first_time, self._vocab = first_time, vocab
        self._lists = [
            [token for token in tokens if 0 <= token < vocab] for tokens in (never, not_first)
        ]

    @abstractmethod
    def write(
        self,
        logits_BV: Tensor,
        begins: Sequence[bool],
        timed: Sequence[bool],
        ranges: Sequence[Ranges],
    ) -> None:
        """Mask logits in place.

        `begins`, `timed` and `ranges` are per row: whether its next token is its first, whether it
        predicts timestamps, and its forbidden ranges. Where all timestamps together are likelier
        than any single text token, a row that predicts timestamps must sample one.
        """


class OnCpu(Forbidden):
    """Mask logits on a CPU, row by row and range by range."""

    def __init__(self, never: Sequence[int], not_first: Sequence[int], first_time: int, vocab: int):
        super().__init__(never, not_first, first_time, vocab)
        self._never, self._not_first = (
            torch.tensor(tokens, dtype=torch.long) for tokens in self._lists
        )

    def write(
        self,
        logits_BV: Tensor,
        begins: Sequence[bool],
        timed: Sequence[bool],
        ranges: Sequence[Ranges],
    ) -> None:
        logits_BV[:, self._never] = NEVER
        for row, begin in enumerate(begins):
            if begin:
                logits_BV[row, self._not_first] = NEVER
            for start, stop in ranges[row]:
                logits_BV[row, start:stop] = NEVER
        if rows := [row for row, says in enumerate(timed) if says]:
            self._prefer_timestamps(logits_BV, rows)

    def _prefer_timestamps(self, logits_BV: Tensor, rows: list[int]) -> None:
        begin = self._first_time
        wins = _timestamps_win(logits_BV[rows], begin)
        for row, win in zip(rows, wins.tolist(), strict=True):
            if win:
                logits_BV[row, :begin] = NEVER


class OnGpu(Forbidden):
    """Mask logits on a GPU without synchronizing: what differs by row is uploaded in one copy."""

    def __init__(
        self,
        never: Sequence[int],
        not_first: Sequence[int],
        first_time: int,
        vocab: int,
        device: torch.device,
    ):
        super().__init__(never, not_first, first_time, vocab)
        self._device = device
        self._never_V, self._not_first_V = (self._mask(tokens) for tokens in self._lists)
        self._tokens_V = torch.arange(vocab, device=device)

    def _mask(self, tokens: list[int]) -> Tensor:
        mask_V = torch.zeros(self._vocab, dtype=torch.bool)
        mask_V[tokens] = True
        return mask_V.to(self._device)

    def write(
        self,
        logits_BV: Tensor,
        begins: Sequence[bool],
        timed: Sequence[bool],
        ranges: Sequence[Ranges],
    ) -> None:
        ranges_BR2 = np.zeros((len(begins), _MOST, 2), dtype=np.int64)
        for row, several in enumerate(ranges):
            ranges_BR2[row, : len(several)] = several if several else 0
        flags_2B = np.array([begins, timed], dtype=np.int64)
        ranges_there, flags = upload_all([ranges_BR2, flags_2B], self._device)
        begins_B1, timed_B1 = flags.bool().unsqueeze(-1)
        start_BR1, stop_BR1 = ranges_there.unsqueeze(2).unbind(-1)
        within_BV = ((self._tokens_V >= start_BR1) & (self._tokens_V < stop_BR1)).any(dim=1)
        logits_BV.masked_fill_(self._never_V | (begins_B1 & self._not_first_V) | within_BV, NEVER)
        if any(timed):
            wins_B1 = _timestamps_win(logits_BV, self._first_time).unsqueeze(-1) & timed_B1
            logits_BV[:, : self._first_time].masked_fill_(wins_B1, NEVER)


def forbidden(
    never: Sequence[int],
    not_first: Sequence[int],
    first_time: int,
    vocab: int,
    device: torch.device,
) -> Forbidden:
    """Return the mask implementation for logits that lie on `device`."""
    if gpu.is_gpu(device):
        return OnGpu(never, not_first, first_time, vocab, device)
    return OnCpu(never, not_first, first_time, vocab)


def _timestamps_win(logits_BV: Tensor, begin: int) -> Tensor:
    """Return which rows [B] give all timestamps together more weight than any single text token."""
    logprobs = logits_BV.log_softmax(dim=-1)
    return logprobs[:, begin:].logsumexp(dim=-1) > logprobs[:, :begin].max(dim=-1).values
