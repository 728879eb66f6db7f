"""Compute LFM2's gated short convolution over packed rows: y = C · conv(B · x).

B, C and x are projected from the token. Shapes: N packed tokens, X hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .recurrent import CausalConv, LayoutRecorder, Mixer, Recurrent


class ShortConv(Mixer):
    """Replace the short convolutions of LFM2, LFM2-MoE and LFM3.

    The state is the last inputs alone.
    """

    def __init__(self, original: nn.Module, step: LayoutRecorder):
        super().__init__(original, step)
        source: Any = original
        self.in_proj, self.out_proj = source.in_proj, source.out_proj
        self.conv = CausalConv(source.conv)
        self.shapes = (self.conv.state_shape,)

    def mix(self, hidden_NX: Tensor, state: Recurrent) -> Tensor:
        b_NX, c_NX, x_NX = self.in_proj(hidden_NX).chunk(3, dim=-1)
        mixed_NX = self.conv(b_NX * x_NX, state.states[0], state.rows).to(hidden_NX.dtype)
        out: Tensor = self.out_proj(c_NX * mixed_NX)
        return out
