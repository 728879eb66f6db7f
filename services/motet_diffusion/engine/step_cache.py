"""Skip a transformer's blocks where its first block indicates little change: first-block cache.

What the blocks after the first add to a picture changes slowly from step to step. If the first
block's own addition has changed by less than `threshold` (mean absolute difference over mean
absolute value), the last addition of the others is reused. The criterion is that of ParaAttention's
first-block cache, which diffusers has too; there the whole batch is one picture, here every row is
decided separately, since rows belong to different pictures at different steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from motet_shared.errors import ConfigError

from .request import Key

RowOfStep = tuple[int, int]  # number of the call within its step, and of the row within that
_CHAINS = ("transformer_blocks", "single_transformer_blocks")
_HIDDEN, _TEXT = "hidden_states", "encoder_hidden_states"
_POSITIONS = frozenset({"image_rotary_emb"})  # shared by all rows


@dataclass(slots=True)
class _Row:
    """Cache the additions of one row: `[tokens, channels]` each.

    first: what the first block added.
    rest: what all others added.
    """

    first: Tensor
    rest: Tensor


class StepCache:
    """Wrap the blocks of `denoiser`. Raises ConfigError if it has no chain of blocks.

    of_rows: leaves out what other rows of a pass than these are drawn with (LoRA, image prompts).
    """

    def __init__(
        self,
        denoiser: nn.Module,
        threshold: float,
        of_rows: Callable[[Sequence[int]], AbstractContextManager[None]],
    ):
        blocks = [block for chain in _CHAINS for block in getattr(denoiser, chain, [])]
        if len(blocks) < 2:
            kind = type(denoiser).__name__
            raise ConfigError(
                f"step_cache={threshold}: a {kind} has no chain of transformer blocks; give 0"
            )
        self._threshold, self._of_rows = threshold, of_rows
        self._cache: dict[Key, dict[RowOfStep, _Row]] = {}
        self._pass = _Pass([], [], torch.empty(0), torch.empty(0), False)
        self._rows: list[tuple[Key, RowOfStep]] = []
        self.computed = self.skipped = 0  # rows
        for number, block in enumerate(blocks):
            block.forward = self._wrap(
                block.forward, is_first=number == 0, is_last=number == len(blocks) - 1
            )

    def begin(self, rows: Sequence[tuple[Key, RowOfStep]]) -> None:
        """Announce the rows of the next pass by picture, in order."""
        self._rows = list(rows)

    def forget(self, key: Key) -> None:
        """Drop the entries of a finished picture."""
        self._cache.pop(key, None)

    def _wrap(
        self, forward: Callable[..., Any], *, is_first: bool, is_last: bool
    ) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if args:  # families pass all arguments by name, except the first
                kwargs = {_HIDDEN: args[0], **kwargs}
            if is_first:
                result = forward(**kwargs)
                self._decide(kwargs[_HIDDEN], result)
                return result
            with self._of_rows(self._pass.computed_rows):
                result = self._pass.for_computed_rows(forward, kwargs)
            return self._merge(result) if is_last else result

        return wrapped

    def _decide(self, block_input: Tensor, result: Any) -> None:
        """Decide which rows go through the other blocks."""
        hidden_first = _hidden(result)
        added = hidden_first - block_input
        computed_rows = [
            row for row in range(len(self._rows)) if not self._is_unchanged(row, added[row])
        ]
        self._pass = _Pass(
            self._rows, computed_rows, hidden_first, added, isinstance(result, tuple)
        )
        self.computed += len(computed_rows)
        self.skipped += len(self._rows) - len(computed_rows)

    def _is_unchanged(self, row: int, added: Tensor) -> bool:
        key, number = self._rows[row]
        cached = self._cache.get(key, {}).get(number)
        if cached is None or cached.first.shape != added.shape:
            return False
        return bool(
            (added - cached.first).abs().mean() < self._threshold * cached.first.abs().mean()
        )

    def _merge(self, result: Any) -> Any:
        """Add the cached part to skipped rows, and cache that of computed rows."""
        current = self._pass
        hidden = _hidden(result)
        if len(current.computed_rows) < len(current.rows):
            hidden = hidden.clone()
        for row, (key, number) in enumerate(current.rows):
            if row in current.computed_rows:
                rest = hidden[row] - current.hidden_first[row]
                self._cache.setdefault(key, {})[number] = _Row(current.added[row], rest)
            else:
                hidden[row] = current.hidden_first[row] + self._cache[key][number].rest
        return (result[0], hidden) if current.is_pair else hidden


@dataclass(slots=True)
class _Pass:
    """Hold the state of one forward pass: rows, computed rows, first block's output and addition.

    hidden_first: `[rows, tokens, channels]`.
    is_pair: blocks return (text, picture), not the picture alone.
    """

    rows: list[tuple[Key, RowOfStep]]
    computed_rows: list[int]
    hidden_first: Tensor  # [rows, tokens, channels]
    added: Tensor
    is_pair: bool  # blocks return (text, picture), not the picture alone

    def for_computed_rows(self, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Return a block's result for the computed rows, and its input for the others."""
        if len(self.computed_rows) == len(self.rows):
            return forward(**kwargs)
        hidden, text = kwargs[_HIDDEN], kwargs.get(_TEXT)
        if not self.computed_rows:
            return (text, hidden) if self.is_pair else hidden
        result = forward(**{name: self._select(name, value) for name, value in kwargs.items()})
        if self.is_pair:
            return self._scatter(text, result[0]), self._scatter(hidden, result[1])
        return self._scatter(hidden, result)

    def _select(self, name: str, value: Any) -> Any:
        is_batch = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == len(self.rows)
        return value[self.computed_rows] if is_batch and name not in _POSITIONS else value

    def _scatter(self, block_input: Any, hidden_first: Any) -> Any:
        if hidden_first is None or block_input is None:
            return hidden_first
        scattered = block_input.clone()
        scattered[self.computed_rows] = hidden_first
        return scattered


def _hidden(result: Any) -> Tensor:
    """Return the picture's part of a block's result."""
    hidden: Tensor = result[1] if isinstance(result, tuple) else result
    return hidden
