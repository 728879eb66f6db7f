"""Mask suppressed tokens in logits: range by range on a CPU, with one mask for all rows on a GPU.

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

MINUS_INFINITY = float("-inf")
Ranges = Sequence[tuple[int, int]]  # of tokens: first inclusive, last exclusive
_MAX_RANGES = 3  # of a row


class TokenSuppression(ABC):
    """Mask tokens that may not be sampled.

    suppressed: tokens that may never be sampled (`suppress_tokens` of generation_config.json).
    begin_suppressed: tokens that may not be sampled first (`begin_suppress_tokens`).
    first_time: the first timestamp token; all later ones are timestamps too.
    """

    def __init__(
        self,
        suppressed: Sequence[int],
        begin_suppressed: Sequence[int],
        first_time: int,
        vocab: int,
    ):
        self._first_time, self._vocab = first_time, vocab
        self._lists = [
            [token for token in tokens if 0 <= token < vocab]
            for tokens in (suppressed, begin_suppressed)
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
            predicts timestamps, and its suppressed ranges. If the probability of all timestamps
            together exceeds that of every text token, a row that predicts timestamps must sample
            one.
        """


class CpuSuppression(TokenSuppression):
    """Mask logits on a CPU, row by row and range by range."""

    def __init__(
        self,
        suppressed: Sequence[int],
        begin_suppressed: Sequence[int],
        first_time: int,
        vocab: int,
    ):
        super().__init__(suppressed, begin_suppressed, first_time, vocab)
        self._suppressed, self._begin_suppressed = (
            torch.tensor(tokens, dtype=torch.long) for tokens in self._lists
        )

    def write(
        self,
        logits_BV: Tensor,
        begins: Sequence[bool],
        timed: Sequence[bool],
        ranges: Sequence[Ranges],
    ) -> None:
        logits_BV[:, self._suppressed] = MINUS_INFINITY
        for row, begin in enumerate(begins):
            if begin:
                logits_BV[row, self._begin_suppressed] = MINUS_INFINITY
            for start, stop in ranges[row]:
                logits_BV[row, start:stop] = MINUS_INFINITY
        if rows := [row for row, is_timed in enumerate(timed) if is_timed]:
            self._prefer_timestamps(logits_BV, rows)

    def _prefer_timestamps(self, logits_BV: Tensor, rows: list[int]) -> None:
        begin = self._first_time
        exceed = _timestamps_exceed(logits_BV[rows], begin)
        for row, exceeds in zip(rows, exceed.tolist(), strict=True):
            if exceeds:
                logits_BV[row, :begin] = MINUS_INFINITY


class GpuSuppression(TokenSuppression):
    """Mask logits on a GPU without synchronizing: what differs by row is uploaded in one copy."""

    def __init__(
        self,
        suppressed: Sequence[int],
        begin_suppressed: Sequence[int],
        first_time: int,
        vocab: int,
        device: torch.device,
    ):
        super().__init__(suppressed, begin_suppressed, first_time, vocab)
        self._device = device
        self._suppressed_V, self._begin_suppressed_V = (
            self._mask(tokens) for tokens in self._lists
        )
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
        host_ranges_BR2 = np.zeros((len(begins), _MAX_RANGES, 2), dtype=np.int64)
        for row, row_ranges in enumerate(ranges):
            host_ranges_BR2[row, : len(row_ranges)] = row_ranges if row_ranges else 0
        flags_2B = np.array([begins, timed], dtype=np.int64)
        ranges_BR2, flags = upload_all([host_ranges_BR2, flags_2B], self._device)
        begins_B1, timed_B1 = flags.bool().unsqueeze(-1)
        start_BR1, stop_BR1 = ranges_BR2.unsqueeze(2).unbind(-1)
        within_BV = ((self._tokens_V >= start_BR1) & (self._tokens_V < stop_BR1)).any(dim=1)
        logits_BV.masked_fill_(
            self._suppressed_V | (begins_B1 & self._begin_suppressed_V) | within_BV, MINUS_INFINITY
        )
        if any(timed):
            exceed_B1 = _timestamps_exceed(logits_BV, self._first_time).unsqueeze(-1) & timed_B1
            logits_BV[:, : self._first_time].masked_fill_(exceed_B1, MINUS_INFINITY)


def token_suppression(
    suppressed: Sequence[int],
    begin_suppressed: Sequence[int],
    first_time: int,
    vocab: int,
    device: torch.device,
) -> TokenSuppression:
    """Return the implementation for logits on `device`."""
    if gpu.is_gpu(device):
        return GpuSuppression(suppressed, begin_suppressed, first_time, vocab, device)
    return CpuSuppression(suppressed, begin_suppressed, first_time, vocab)


def _timestamps_exceed(logits_BV: Tensor, begin: int) -> Tensor:
    """Return for which rows [B] all timestamps together are likelier than any text token."""
    logprobs = logits_BV.log_softmax(dim=-1)
    return logprobs[:, begin:].logsumexp(dim=-1) > logprobs[:, :begin].max(dim=-1).values
