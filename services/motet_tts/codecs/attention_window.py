"""Keep the keys and values of a codec's transformer as streams, within its window.

Shapes: B sequences, N new steps, L layers, H heads, T remembered steps, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motet_kernels.spans import upload


@dataclass(slots=True, kw_only=True)
class AttentionState:
    """Hold what one sequence's transformer remembers: keys and values `[L, H, T, D]`, and its steps."""

    keys: Tensor | None = None
    values: Tensor | None = None
    steps: int = 0


class AttentionWindow:
    """Provide a batch's kept keys and values as a transformers cache, padded on the left."""

    def __init__(
        self, states: Sequence[AttentionState], count: int, window: int, device: torch.device
    ):
        self._states, self._count, self._window = states, count, window
        lengths = [0 if state.keys is None else state.keys.shape[2] for state in states]
        self._past, lengths_B = max(lengths), torch.tensor(lengths)
        positions_BN = torch.tensor([state.steps for state in states])[:, None] + torch.arange(
            count
        )
        # Distance of a key from its query, both counted from the first kept step.
        distance_NT = (self._past + torch.arange(count))[:, None] - torch.arange(self._past + count)
        near_NT = (distance_NT >= 0) & (distance_NT < window)
        there_BT = torch.arange(self._past + count) >= (self._past - lengths_B)[:, None]
        self.positions = upload(positions_BN, device)
        self.mask = upload((near_NT & there_BT[:, None])[:, None], device)
        self._past_keys, self._past_values = self._stacked("keys"), self._stacked("values")
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(
        self, keys_BHND: Tensor, values_BHND: Tensor, layer_idx: int, *_: object
    ) -> tuple[Tensor, Tensor]:
        self._keys.append(_append(self._past_keys, layer_idx, keys_BHND))
        self._values.append(_append(self._past_values, layer_idx, values_BHND))
        return self._keys[-1], self._values[-1]

    def _stacked(self, which: str) -> Tensor | None:
        """Return the states' keys or values `[L, B, H, T, D]`; None if there are none."""
        if not self._past:
            return None
        kept: list[Tensor | None] = [getattr(state, which) for state in self._states]
        like = next(one for one in kept if one is not None)
        layers, heads, _, dim = like.shape
        past_LBHTD = like.new_zeros(layers, len(kept), heads, self._past, dim)
        for row, kept_LHTD in enumerate(kept):
            if kept_LHTD is not None:
                past_LBHTD[:, row, :, self._past - kept_LHTD.shape[2] :] = kept_LHTD
        return past_LBHTD

    def store(self) -> None:
        if self._keys:
            keys_LBHTD, values_LBHTD = torch.stack(self._keys), torch.stack(self._values)
        for row, state in enumerate(self._states):
            state.steps += self._count
            length = min(state.steps, self._window - 1)
            if self._keys and length:
                state.keys = keys_LBHTD[:, row, :, -length:].clone()
                state.values = values_LBHTD[:, row, :, -length:].clone()


def _append(past_LBHTD: Tensor | None, layer: int, new_BHND: Tensor) -> Tensor:
    return new_BHND if past_LBHTD is None else torch.cat([past_LBHTD[layer], new_BHND], dim=2)
