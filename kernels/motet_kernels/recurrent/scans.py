"""Compute the recurrences of state-space and linear-attention layers over packed rows.

Each row continues from the state in its slot; states are advanced in place, one slot per row. The
native kernels go token by token, so that a token's result is bit-identical wherever its row is cut
and whatever other rows are in the step. The twins (`twins.py`) compute long rows in
blocks and agree up to rounding.

Shapes: P slots, B rows, N packed tokens, C channels, K taps (conv) or key heads (delta rule), H
heads, D head or key dimension, G groups of heads, M state dimension, V value dimension. Everything
is float32; tokens may be strided, the dimensions after them are dense.
"""

from __future__ import annotations

import torch
from torch import Tensor

from motet_kernels.recurrent import twins
from motet_kernels.recurrent.packed_rows import PackedRows
from motet_kernels.runtime.arguments import check_device, is_cpu
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.native import Kernel

_CONV = Kernel("motet_conv_scan", "pippipippiip")
_MAMBA1 = Kernel("motet_mamba1_scan", "pippipipippipiiip")
_MAMBA2 = Kernel("motet_mamba2_scan", "pippipipippipiiiiip")
_DELTA = Kernel("motet_delta_scan", "pippipipipipiipiiiiip")


def conv_scan(
    state_PKC: Tensor, rows: PackedRows, x_NC: Tensor, taps_KC: Tensor, bias_C: Tensor | None
) -> Tensor:
    """Compute a depthwise causal convolution. Return dense `[N, C]`.

    `out[t] = bias + taps[0]·x[t - K + 1] + … + taps[K - 1]·x[t]`. The state is the last K - 1
    inputs.
    """
    taps, channels = taps_KC.shape
    _check("x_NC", x_NC, (rows.starts[-1], channels))
    _check_state("state_PKC", state_PKC, (taps - 1, channels), x_NC)
    taps_KC = taps_KC.contiguous()
    _check("taps_KC", taps_KC, (taps, channels))
    if bias_C is not None:
        _check("bias_C", bias_C, (channels,))
    native = _CONV.native() if is_cpu(x_NC) else None
    if native is None:
        return twins.conv_torch(state_PKC, rows, x_NC, taps_KC, bias_C)
    out_NC = x_NC.new_empty(x_NC.shape)
    bias = 0 if bias_C is None else bias_C.data_ptr()
    tail = (taps_KC.data_ptr(), bias, channels, taps, out_NC.data_ptr())
    _run(rows, state_PKC, native(*_states(state_PKC, rows), x_NC.data_ptr(), x_NC.stride(0), *tail))
    return out_NC


def mamba2_scan(
    state_PHDM: Tensor,
    rows: PackedRows,
    x_NHD: Tensor,
    dt_NH: Tensor,
    a_H: Tensor,
    b_NGM: Tensor,
    c_NGM: Tensor,
) -> Tensor:
    """Compute Mamba-2's recurrence (arXiv 2405.21060) without its skip. Return dense `[N, H, D]`.

    `h ← exp(dt·a)·h + dt·x·Bᵀ`, `y = h·C`.
    """
    heads, dim, state_dim = state_PHDM.shape[1:]
    tokens, groups = rows.starts[-1], b_NGM.shape[1]
    _check("x_NHD", x_NHD, (tokens, heads, dim))
    _check("dt_NH", dt_NH, (tokens, heads))
    _check("a_H", a_H, (heads,))
    _check("b_NGM", b_NGM, (tokens, groups, state_dim))
    _check("c_NGM", c_NGM, (tokens, groups, state_dim))
    _check_groups("groups", groups, heads)
    _check_state("state_PHDM", state_PHDM, (heads, dim, state_dim), x_NHD)
    native = _MAMBA2.native() if is_cpu(x_NHD) else None
    if native is None:
        return twins.mamba2_torch(state_PHDM, rows, x_NHD, dt_NH, a_H, b_NGM, c_NGM)
    out_NHD = x_NHD.new_empty(x_NHD.shape)
    tokens_in = (*_tokens(x_NHD), *_tokens(dt_NH), a_H.data_ptr(), *_tokens(b_NGM), *_tokens(c_NGM))
    sizes = (heads, dim, groups, state_dim)
    _run(
        rows, state_PHDM, native(*_states(state_PHDM, rows), *tokens_in, *sizes, out_NHD.data_ptr())
    )
    return out_NHD


def mamba1_scan(
    state_PCM: Tensor,
    rows: PackedRows,
    x_NC: Tensor,
    dt_NC: Tensor,
    a_CM: Tensor,
    b_NM: Tensor,
    c_NM: Tensor,
) -> Tensor:
    """Compute Mamba-1's recurrence (arXiv 2312.00752) without its skip. Return dense `[N, C]`.

    `h ← exp(dt·A)·h + dt·x·B`, `y = h·C` by channel.
    """
    channels, state_dim = a_CM.shape
    tokens = rows.starts[-1]
    _check("x_NC", x_NC, (tokens, channels))
    _check("dt_NC", dt_NC, (tokens, channels))
    _check("a_CM", a_CM, (channels, state_dim))
    _check("b_NM", b_NM, (tokens, state_dim))
    _check("c_NM", c_NM, (tokens, state_dim))
    _check_state("state_PCM", state_PCM, (channels, state_dim), x_NC)
    a_CM = a_CM.contiguous()
    native = _MAMBA1.native() if is_cpu(x_NC) else None
    if native is None:
        return twins.mamba1_torch(state_PCM, rows, x_NC, dt_NC, a_CM, b_NM, c_NM)
    out_NC = x_NC.new_empty(x_NC.shape)
    tokens_in = (*_tokens(x_NC), *_tokens(dt_NC), a_CM.data_ptr(), *_tokens(b_NM), *_tokens(c_NM))
    _run(
        rows,
        state_PCM,
        native(*_states(state_PCM, rows), *tokens_in, channels, state_dim, out_NC.data_ptr()),
    )
    return out_NC


def delta_scan(
    state_PHDV: Tensor,
    rows: PackedRows,
    q_NKD: Tensor,
    k_NKD: Tensor,
    v_NHV: Tensor,
    decay: Tensor,
    beta_NH: Tensor,
) -> Tensor:
    """Compute the gated delta rule (arXiv 2412.06464). Return dense `[N, H, V]`.

    `S ← α·S + k·(β(v - kᵀα·S))ᵀ`, `y = qᵀS`. `decay` is log α, one per head (`[N, H]`) or one per
    key dimension (`[N, H, D]`, arXiv 2510.26692). Every H / K value heads share a query and a key.
    The twin's blocks assume keys of norm at most one.
    """
    heads, dim, value_dim = state_PHDV.shape[1:]
    tokens, key_heads = rows.starts[-1], q_NKD.shape[1]
    _check("q_NKD", q_NKD, (tokens, key_heads, dim))
    _check("k_NKD", k_NKD, (tokens, key_heads, dim))
    _check("v_NHV", v_NHV, (tokens, heads, value_dim))
    _check("decay", decay, (tokens, heads, dim)[: decay.ndim])
    _check("beta_NH", beta_NH, (tokens, heads))
    _check_groups("key heads", key_heads, heads)
    _check_state("state_PHDV", state_PHDV, (heads, dim, value_dim), v_NHV)
    native = _DELTA.native() if is_cpu(v_NHV) else None
    if native is None:
        return twins.delta_torch(state_PHDV, rows, q_NKD, k_NKD, v_NHV, decay, beta_NH)
    out_NHV = v_NHV.new_empty(v_NHV.shape)
    tokens_in = (
        *_tokens(q_NKD),
        *_tokens(k_NKD),
        *_tokens(v_NHV),
        *_tokens(decay),
        int(decay.ndim == 3),
    )
    sizes = (heads, key_heads, dim, value_dim, out_NHV.data_ptr())
    _run(
        rows, state_PHDV, native(*_states(state_PHDV, rows), *tokens_in, *_tokens(beta_NH), *sizes)
    )
    return out_NHV


def _states(state: Tensor, rows: PackedRows) -> tuple[int, ...]:
    return (
        state.data_ptr(),
        len(state),
        rows.slots_B.data_ptr(),
        rows.starts_B1.data_ptr(),
        len(rows.slots_B),
    )


def _tokens(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.stride(0)


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise `KernelError` unless `tensor` is float32 of `shape`, dense after dimension 0."""
    if tensor.dtype != torch.float32 or tensor.shape != shape:
        raise KernelError(
            f"{name}: {tensor.dtype} of shape {list(tensor.shape)} must be float32 of {list(shape)}"
        )
    if len(tensor) and not tensor[0].is_contiguous():
        raise KernelError(
            f"{name}: strides {list(tensor.stride())} must be dense behind the first; call .contiguous()"
        )


def _check_groups(name: str, groups: int, heads: int) -> None:
    if not groups or heads % groups:
        raise KernelError(f"{name}: {groups} must divide the {heads} heads")


def _check_state(name: str, state: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    if state.dtype != torch.float32 or state.shape[1:] != shape or not state.is_contiguous():
        raise KernelError(
            f"{name}: {state.dtype} of shape {list(state.shape)} must be dense float32 of slots x {list(shape)}"
        )
    check_device(name, state, "its input", like)


def _run(rows: PackedRows, state: Tensor, bad: int) -> None:
    if bad:
        raise KernelError(
            f"slots_B[{bad - 1}]: slot {int(rows.slots_B[bad - 1])} must be from 0 to {len(state) - 1}"
        )
