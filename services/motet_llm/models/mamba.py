"""Compute Mamba-1 and Mamba-2 over packed rows.

The recurrences themselves are `mamba1_scan` and `mamba2_scan` of `motet_kernels`; around them are a
projection, a short convolution, a gate and a norm.

The lower bound of Δ (`time_step_limit`) holds for every token; transformers applies it to prompts
only.

Shapes: N packed tokens, X hidden size, H heads, D head dimension, G groups of heads that share B
and C, M state dimension, C channels (Mamba-1), I = H·D channels (Mamba-2), R rank of Δ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from motet_kernels import gates
from motet_kernels.linear.head_linear import HeadLinear
from motet_kernels.recurrent.scans import mamba1_scan, mamba2_scan

from .recurrent import CausalConv, LayoutRecorder, Mixer, Recurrent, activation


class Mamba2(Mixer):
    """Replace Mamba-2 mixers.

    They are those of Bamba, Falcon-H1, GraniteMoeHybrid, Mamba-2, Nemotron-H and Zamba-2.
    """

    a_H: Tensor
    projection_scale: Tensor | None

    def __init__(self, original: nn.Module, step: LayoutRecorder):
        super().__init__(original, step)
        source: Any = original
        self.in_proj, self.norm, self.out_proj = source.in_proj, source.norm, source.out_proj
        self.conv1d, self.act = CausalConv(source.conv1d), activation(source.act)
        self.dt_bias, self.D = source.dt_bias, source.D
        self.register_buffer("a_H", -source.A_log.detach().float().exp(), persistent=False)
        self.heads, self.head_dim = source.num_heads, source.head_dim
        self.groups, self.state_dim = source.n_groups, source.ssm_state_size
        self.dt_limit = source.time_step_limit
        # Falcon-H1: fixed factors on the input and on each part of its projection, and the norm is optional.
        self.in_scale: float = getattr(source, "ssm_in_multiplier", 1.0)
        self.register_buffer(
            "projection_scale", getattr(source, "mup_vector", None), persistent=False
        )
        self.shapes = (self.conv1d.state_shape, (self.heads, self.head_dim, self.state_dim))

    def mix(self, hidden_NX: Tensor, state: Recurrent) -> Tensor:
        channels, bc_dim, rows = (
            self.heads * self.head_dim,
            self.groups * self.state_dim,
            state.rows,
        )
        projected = self.in_proj(hidden_NX if self.in_scale == 1.0 else hidden_NX * self.in_scale)
        if self.projection_scale is not None:
            projected = projected * self.projection_scale[0]
        gate_NI, conv_in, dt_NH = projected.split(
            [channels, channels + 2 * bc_dim, self.heads], dim=-1
        )
        mixed = self.act(self.conv1d(conv_in, state.states[0], rows))
        x, b, c = mixed.split([channels, bc_dim, bc_dim], dim=-1)
        x_NHD = x.unflatten(1, (self.heads, self.head_dim))
        b_NGM, c_NGM = (part.unflatten(1, (self.groups, self.state_dim)) for part in (b, c))
        dt_NH = gates.softplus(dt_NH.float() + self.dt_bias.float()).clamp(*self.dt_limit)
        y_NHD = mamba2_scan(state.states[1], rows, x_NHD, dt_NH, self.a_H.float(), b_NGM, c_NGM)
        y_NI = y_NHD.addcmul_(x_NHD, self.D.float()[:, None]).flatten(1).to(hidden_NX.dtype)
        output: Tensor = self.out_proj(self._gated(y_NI, gate_NI).to(hidden_NX.dtype))
        return output

    def _gated(self, y_NI: Tensor, gate_NI: Tensor) -> Tensor:
        if isinstance(self.norm, nn.Identity):
            return y_NI * gates.silu(gate_NI.float()).to(y_NI.dtype)
        gated: Tensor = self.norm(y_NI.unsqueeze(0), gate_NI.unsqueeze(0))[0]
        return gated


class Mamba1(Mixer):
    """Replace the Mamba-1 mixers of Falcon-Mamba, Jamba and Mamba."""

    a_CM: Tensor

    def __init__(self, original: nn.Module, step: LayoutRecorder):
        super().__init__(original, step)
        source: Any = original
        self.in_proj, self.x_proj, self.dt_proj = source.in_proj, source.x_proj, source.dt_proj
        self.conv1d, self.act = CausalConv(source.conv1d), activation(source.act)
        self.out_proj = source.out_proj
        self.D = source.D
        # Jamba and Falcon-Mamba normalize Δ, B and C.
        norms = ("dt_layernorm", "b_layernorm", "c_layernorm")
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = (
            getattr(source, name, None) or nn.Identity() for name in norms
        )
        self.register_buffer("a_CM", -source.A_log.detach().float().exp(), persistent=False)
        self.shapes = (self.conv1d.state_shape, tuple(self.a_CM.shape))

    def mix(self, hidden_NX: Tensor, state: Recurrent) -> Tensor:
        rows, dim = state.rows, self.a_CM.shape[1]
        conv_in, gate_NC = self.in_proj(hidden_NX).chunk(2, dim=-1)
        x_NC = self.act(self.conv1d(conv_in, state.states[0], rows))
        projected = self.x_proj(x_NC.to(hidden_NX.dtype))
        dt, b, c = projected.split([projected.shape[1] - 2 * dim, dim, dim], dim=-1)
        dt_NC = gates.softplus(self.dt_proj(self.dt_layernorm(dt)).float())
        b_NM, c_NM = self.b_layernorm(b).float(), self.c_layernorm(c).float()
        y_NC = mamba1_scan(state.states[1], rows, x_NC, dt_NC, self.a_CM.float(), b_NM, c_NM)
        y_NC = y_NC.addcmul_(x_NC, self.D.float()) * gates.silu(gate_NC.float())
        out: Tensor = self.out_proj(y_NC.to(hidden_NX.dtype))
        return out


class ZambaMamba(Mixer):
    """Replace Zamba's mixer: Mamba-1 with Δ, B and C for each head, and so a state for each."""

    def __init__(self, original: nn.Module, step: LayoutRecorder):
        super().__init__(original, step)
        source: Any = original
        self.in_proj, self.out_proj = source.in_proj, source.out_proj
        self.conv1d, self.act = CausalConv(source.conv1d), activation(source.act)
        self.x_proj = HeadLinear.pack(source.x_proj_weight.detach().float(), "float32")
        self.dt_proj = HeadLinear.pack(source.dt_proj_weight.detach().float(), "float32")
        self.dt_bias, self.D = source.dt_proj_bias, source.D
        self.a_HDM = nn.Buffer(-source.A_log.detach().float().exp(), persistent=False)
        self.rank = source.time_step_rank
        heads, head_dim, state_dim = self.a_HDM.shape
        self.shapes = (self.conv1d.state_shape, *[(head_dim, state_dim)] * heads)

    def mix(self, hidden_NX: Tensor, state: Recurrent) -> Tensor:
        heads, head_dim, state_dim = self.a_HDM.shape
        rows = state.rows
        conv_in, gate_NC = self.in_proj(hidden_NX).unflatten(1, (-1, 2)).unbind(2)
        x_NC = self.act(self.conv1d(conv_in.contiguous(), state.states[0], rows))
        x_NHD = x_NC.unflatten(1, (heads, head_dim))
        dt_NHR, b_NHM, c_NHM = self.x_proj(x_NHD).split([self.rank, state_dim, state_dim], dim=-1)
        dt_NC = gates.softplus((self.dt_proj(dt_NHR) + self.dt_bias.float()).flatten(1))
        dt_NHD = dt_NC.unflatten(1, (heads, head_dim))
        outs = [
            mamba1_scan(
                state.states[1 + h],
                rows,
                x_NHD[:, h],
                dt_NHD[:, h],
                self.a_HDM[h].float(),
                b_NHM[:, h],
                c_NHM[:, h],
            )
            for h in range(heads)
        ]
        y_NC = (torch.stack(outs, dim=1) + x_NHD * self.D.float()).flatten(1)
        out: Tensor = self.out_proj(
            (y_NC * gates.silu(gate_NC.float().contiguous())).to(hidden_NX.dtype)
        )
        return out
