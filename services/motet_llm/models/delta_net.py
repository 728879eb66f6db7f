"""Compute gated delta networks over packed rows.

They are the linear attention of Qwen3-Next, Qwen3.5, OLMo-Hybrid, Kimi-Linear and Ling-3. The
recurrence itself is `delta_scan` of `motet_kernels`. Queries and keys have length one, queries are
scaled by D**-0.5. The families differ in how they project a token and in what the decay depends on.

Shapes: N packed tokens, X hidden size, H value heads, K key heads, D key dimension, V value
dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from motet_kernels import gates
from motet_kernels.recurrent.scans import delta_scan

from .recurrent import CausalConv, LayoutRecorder, Mixer, Recurrent


class DeltaRule(Mixer):
    """Compute what all gated delta networks share; subclasses project the token."""

    def __init__(
        self,
        original: nn.Module,
        step: LayoutRecorder,
        key_heads: int,
        heads: int,
        key_dim: int,
        value_dim: int,
    ):
        super().__init__(original, step)
        source: Any = original
        self.conv1d = CausalConv(source.conv1d)
        self.key_heads, self.heads, self.key_dim, self.value_dim = (
            key_heads,
            heads,
            key_dim,
            value_dim,
        )
        self.shapes = (self.conv1d.state_shape, (heads, key_dim, value_dim))

    def recall(self, state: Recurrent, qkv_NX: Tensor, decay: Tensor, beta_NH: Tensor) -> Tensor:
        """Return the outputs `[N, H, V]` of the recurrence.

        qkv_NX: queries, keys and values before their convolution. decay: log decays `[N, H]`, or
        `[N, H, D]` with one for each key dimension. beta_NH: the strength of corrections.
        """
        rows = state.rows
        mixed = gates.silu(self.conv1d(qkv_NX, state.states[0], rows))
        width = self.key_heads * self.key_dim
        q, k, v_NX = mixed.split([width, width, self.heads * self.value_dim], dim=-1)
        q_NKD, k_NKD = self._unit(q) * self.key_dim**-0.5, self._unit(k)
        v_NHV = v_NX.unflatten(1, (self.heads, self.value_dim))
        y_NHV = delta_scan(
            state.states[1], rows, q_NKD, k_NKD, v_NHV, decay.float(), beta_NH.float()
        )
        return y_NHV.to(qkv_NX.dtype)

    def _unit(self, x_NX: Tensor) -> Tensor:
        x_NKD = x_NX.unflatten(1, (self.key_heads, self.key_dim))
        output: Tensor = x_NKD * torch.rsqrt(x_NKD.square().sum(-1, keepdim=True) + 1e-6)
        return output


class GatedDeltaNet(DeltaRule):
    """Compute a decay per head, -exp(A_log)·softplus(a + dt_bias).

    The output norm is gated by z.
    """

    def __init__(self, original: nn.Module, step: LayoutRecorder):
        source: Any = original
        dims = source.num_k_heads, source.num_v_heads, source.head_k_dim, source.head_v_dim
        super().__init__(original, step, *dims)
        self.A_log, self.dt_bias = source.A_log, source.dt_bias
        self.beta_scale = 1.0

    def gated_delta(self, state: Recurrent, qkv_NX: Tensor, a_NH: Tensor, b_NH: Tensor) -> Tensor:
        decay_NH = -self.A_log.float().exp() * gates.softplus(a_NH.float() + self.dt_bias.float())
        return self.recall(state, qkv_NX, decay_NH, gates.sigmoid(b_NH.float()) * self.beta_scale)

    def heads_of(self, x_NX: Tensor) -> Tensor:
        output: Tensor = x_NX.unflatten(1, (self.heads, self.value_dim))
        return output


class Qwen3NextDeltaNet(GatedDeltaNet):
    """Replace Qwen3-Next's mixer: one matrix for q, k, v and z and one for b and a.

    Their rows are grouped by key head.
    """

    def __init__(self, original: nn.Module, step: LayoutRecorder):
        super().__init__(original, step)
        source: Any = original
        self.in_proj_qkvz, self.in_proj_ba = source.in_proj_qkvz, source.in_proj_ba
        self.norm, self.out_proj = source.norm, source.out_proj

    def mix(self, hidden_NX: Tensor, state: Recurrent) -> Tensor:
        shared = self.heads // self.key_heads
        value_width = shared * self.value_dim
        grouped = self.in_proj_qkvz(hidden_NX).unflatten(1, (self.key_heads, -1))
        q, k, v, z = grouped.split([self.key_dim, self.key_dim, value_width, value_width], dim=-1)
        b, a = (
            self.in_proj_ba(hidden_NX)
            .unflatten(1, (self.key_heads, -1))
            .split([shared, shared], dim=-1)
        )
        qkv_NX = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
        y_NHV = self.gated_delta(state, qkv_NX, a.flatten(1), b.flatten(1))
        out: Tensor = self.out_proj(self.norm(y_NHV, self.heads_of(z.flatten(1))).flatten(1))
        return out


class Qwen35DeltaNet(GatedDeltaNet):
    """Replace Qwen3.5's mixer: one matrix for q, k and v together, and one each for z, b and a."""

    def __init__(self, original: nn.Module, step: LayoutRecorder):
        super().__init__(original, step)
        source: Any = original
        self.in_proj_qkv, self.in_proj_z = source.in_proj_qkv, source.in_proj_z
        self.in_proj_a, self.in_proj_b = source.in_proj_a, source.in_proj_b
        self.norm, self.out_proj = source.norm, source.out_proj

    def mix(self, hidden_NX: Tensor, state: Recurrent) -> Tensor:
        a_NH, b_NH = self.in_proj_a(hidden_NX), self.in_proj_b(hidden_NX)
        y_NHV = self.gated_delta(state, self.in_proj_qkv(hidden_NX), a_NH, b_NH)
        out: Tensor = self.out_proj(
            self.norm(y_NHV, self.heads_of(self.in_proj_z(hidden_NX))).flatten(1)
        )
        return out


class OlmoHybridDeltaNet(GatedDeltaNet):
    """Replace OLMo-Hybrid's mixer: one matrix for each projection.

    Corrections are up to twice the error where negative eigenvalues are allowed.
    """

    def __init__(self, original: nn.Module, step: LayoutRecorder):
        super().__init__(original, step)
        source: Any = original
        self.q_proj, self.k_proj, self.v_proj = source.q_proj, source.k_proj, source.v_proj
        self.a_proj, self.b_proj, self.g_proj = source.a_proj, source.b_proj, source.g_proj
        self.o_norm, self.o_proj = source.o_norm, source.o_proj
        self.beta_scale = 2.0 if source.allow_neg_eigval else 1.0

    def mix(self, hidden_NX: Tensor, state: Recurrent) -> Tensor:
        qkv_NX = torch.cat(
            [proj(hidden_NX) for proj in (self.q_proj, self.k_proj, self.v_proj)], dim=-1
        )
        y_NHV = self.gated_delta(state, qkv_NX, self.a_proj(hidden_NX), self.b_proj(hidden_NX))
        out: Tensor = self.o_proj(
            self.o_norm(y_NHV, self.heads_of(self.g_proj(hidden_NX))).flatten(1)
        )
        return out


class KimiDeltaAttention(DeltaRule):
    """Replace the mixers of Kimi-Linear and Ling-3 (BailingHybrid): a decay per key dimension.

    The decay comes from a separate forget gate. The output gate is one projection in Ling-3, and
    one of low rank in Kimi-Linear.
    """

    def __init__(self, original: nn.Module, step: LayoutRecorder):
        source: Any = original
        super().__init__(
            original, step, source.num_heads, source.num_heads, source.head_dim, source.head_dim
        )
        self.q_proj, self.k_proj, self.v_proj = source.q_proj, source.k_proj, source.v_proj
        self.forget_gate, self.b_proj = source.forget_gate, source.b_proj
        self.gates = [name for name in ("g_a_proj", "g_b_proj", "g_proj") if hasattr(source, name)]
        for name in self.gates:
            setattr(self, name, getattr(source, name))
        self.o_norm, self.o_proj = source.o_norm, source.o_proj

    def mix(self, hidden_NX: Tensor, state: Recurrent) -> Tensor:
        qkv_NX = torch.cat(
            [proj(hidden_NX) for proj in (self.q_proj, self.k_proj, self.v_proj)], dim=-1
        )
        decay_NHD = self.forget_gate(hidden_NX.unsqueeze(0))[0]
        y_NHV = self.recall(state, qkv_NX, decay_NHD, gates.sigmoid(self.b_proj(hidden_NX).float()))
        gate = hidden_NX
        for name in self.gates:
            gate = getattr(self, name)(gate)
        out: Tensor = self.o_proj(
            self.o_norm(y_NHV, gate.unflatten(1, (self.heads, self.value_dim))).flatten(1)
        )
        return out
