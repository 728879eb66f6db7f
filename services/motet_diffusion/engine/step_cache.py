"""Skip a transformer's blocks where its first block indicates little change: first-block cache.

What the blocks after the first add to a picture changes slowly from step to step. If the first
block's own addition has changed by less than `threshold` (mean absolute difference over mean
absolute value), the last addition of the others is reused. The criterion is that of ParaAttention's
first-block cache, which diffusers has too; there the whole batch is one picture, here every row is
decided separately, since rows belong to different pictures at different steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from motet_shared.errors import ConfigError

from .request import Key

_CHAINS = ("transformer_blocks", "single_transformer_blocks")
_HIDDEN, _TEXT = "hidden_states", "encoder_hidden_states"
_POSITIONS = frozenset({"image_rotary_emb"})  # shared by all rows


@dataclass(slots=True)
class _Row:
    """Cached additions of one row: `[tokens, channels]` each."""

    first: Tensor  # what the first block added
    rest: Tensor  # what all others added


class StepCache:
    """Wrap the blocks of `denoiser`. Raises ConfigError if it has no chain of blocks."""

    def __init__(self, denoiser: nn.Module, threshold: float):
        blocks = [block for chain in _CHAINS for block in getattr(denoiser, chain, [])]
        if len(blocks) < 2:
            kind = type(denoiser).__name__
            raise ConfigError(
                f"step_cache={threshold}: a {kind} has no chain of transformer blocks; give 0"
            )
        self._threshold = threshold
        self._memory: dict[Key, dict[int, _Row]] = {}
        self._pass = _Pass([], [], torch.empty(0), torch.empty(0), False)
        self._rows: list[tuple[Key, int]] = []
        self.computed = self.skipped = 0  # rows
        for number, block in enumerate(blocks):
            block.forward = self._wrapped(
                block.forward, is_first=number == 0, is_last=number == len(blocks) - 1
            )

    def begin(self, rows: Sequence[tuple[Key, int]]) -> None:
        """Announce the rows of the next pass, as (picture, row), in order."""
        self._rows = list(rows)

    def forget(self, key: Key) -> None:
        """Drop the entries of a finished picture."""
        self._memory.pop(key, None)

    def _wrapped(
        self, forward: Callable[..., Any], *, is_first: bool, is_last: bool
    ) -> Callable[..., Any]:
        def through(*args: Any, **kwargs: Any) -> Any:
            if args:  # families pass all arguments by name, except the first
                kwargs = {_HIDDEN: args[0], **kwargs}
            if is_first:
                result = forward(**kwargs)
                self._decide(kwargs[_HIDDEN], result)
                return result
            result = self._pass.for_kept(forward, kwargs)
            return self._finished(result) if is_last else result

        return through

    def _decide(self, given: Tensor, result: Any) -> None:
        """Decide which rows go through the other blocks."""
        made = _hidden(result)
        added = made - given
        kept = [row for row in range(len(self._rows)) if not self._is_unchanged(row, added[row])]
        self._pass = _Pass(self._rows, kept, made, added, isinstance(result, tuple))
        self.computed += len(kept)
        self.skipped += len(self._rows) - len(kept)

    def _is_unchanged(self, row: int, added: Tensor) -> bool:
        key, number = self._rows[row]
        known = self._memory.get(key, {}).get(number)
        if known is None or known.first.shape != added.shape:
            return False
        return bool((added - known.first).abs().mean() < self._threshold * known.first.abs().mean())

    def _finished(self, result: Any) -> Any:
        """Add the cached part to skipped rows, and cache that of computed rows."""
        now = self._pass
        hidden = _hidden(result)
        if len(now.kept) < len(now.rows):
            hidden = hidden.clone()
        for row, (key, number) in enumerate(now.rows):
            if row in now.kept:
                rest = hidden[row] - now.made[row]
                self._memory.setdefault(key, {})[number] = _Row(now.added[row], rest)
            else:
                hidden[row] = now.made[row] + self._memory[key][number].rest
        return (result[0], hidden) if now.is_pair else hidden


@dataclass(slots=True)
class _Pass:
    """State of one forward pass: rows, computed rows, and the first block's output and addition."""

    rows: list[tuple[Key, int]]
    kept: list[int]
    made: Tensor  # [rows, tokens, channels]
    added: Tensor
    is_pair: bool  # blocks return (text, picture), not the picture alone

    def for_kept(self, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Return a block's result for the kept rows, and its input for the others."""
        if len(self.kept) == len(self.rows):
            return forward(**kwargs)
        hidden, text = kwargs[_HIDDEN], kwargs.get(_TEXT)
        if not self.kept:
            return (text, hidden) if self.is_pair else hidden
        result = forward(**{name: self._picked(name, value) for name, value in kwargs.items()})
        if self.is_pair:
            return self._put(text, result[0]), self._put(hidden, result[1])
        return self._put(hidden, result)

    def _picked(self, name: str, value: Any) -> Any:
        is_batch = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == len(self.rows)
        return value[self.kept] if is_batch and name not in _POSITIONS else value

    def _put(self, given: Any, made: Any) -> Any:
        if made is None or given is None:
            return made
        whole = given.clone()
        whole[self.kept] = made
        return whole


def _hidden(result: Any) -> Tensor:
    """Return the picture's part of a block's result."""
    hidden: Tensor = result[1] if isinstance(result, tuple) else result
    return hidden
