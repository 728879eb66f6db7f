"""Compute the recurrences in torch: the twins of the kernels in `scans.py`.

Leading rows of one token advance together, other rows in blocks of matrix products. Mamba-2's
blocks are those of section 6 of arXiv 2405.21060. In the delta rule the corrections u of a block,
decayed relative to its start, solve a triangular system: (I + A)·u = β(v - k̃ᵀS), A the strictly
lower part of β·k̃·k̃ᵀ (section 3.3 of arXiv 2412.06464). Decays per key dimension do not factor out
of A without overflow, and Mamba-1 has one decay per element of its state: these two go token by
token.

Shapes: S rows of one token, L tokens of a row or of a block, the others as in `scans.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from motet_kernels.recurrent.packed_rows import PackedRows
from motet_kernels.runtime.errors import KernelError

BLOCK = 64

Advance = Callable[..., tuple[Tensor, Tensor]]


def over_rows(
    states: Tensor, rows: PackedRows, step: Advance, chunk: Advance, *inputs: Tensor
) -> Tensor:
    """Apply `step` to the leading rows of one token together, and `chunk` to each other row.

    They are called as `step(states_S, *inputs_S)` and `chunk(state, *inputs_L)`; both return
    outputs and the state after the last token. Raises `KernelError` on a slot that is out of range.
    """
    slots, starts = rows.slots(), rows.starts
    for row, slot in enumerate(slots):
        if not 0 <= slot < len(states):
            raise KernelError(f"slots_B[{row}]: slot {slot} must be from 0 to {len(states) - 1}")
    lengths = [stop - start for start, stop in pairwise(starts)]
    single = next((row for row, length in enumerate(lengths) if length != 1), len(slots))
    outs = []
    if single:
        slots_S = rows.slots_B[:single]
        out, after = step(states.index_select(0, slots_S), *(x[:single] for x in inputs))
        states.index_copy_(0, slots_S, after)
        outs.append(out)
    for slot, start, length in zip(slots[single:], starts[single:], lengths[single:], strict=False):
        if length:
            out, states[slot] = chunk(states[slot], *(x[start : start + length] for x in inputs))
            outs.append(out)
    return torch.cat(outs) if outs else step(states[:0], *inputs)[0]


def token_by_token(step: Advance, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Apply `step` to one token at a time; return outputs and the state after the last token."""
    state, outs = state.unsqueeze(0), []
    for token in zip(*(x.split(1) for x in inputs), strict=True):
        out, state = step(state, *token)
        outs.append(out)
    return torch.cat(outs), state[0]


def pairwise_decay(decay_HL: Tensor) -> Tensor:
    """Return the decays from token j to token i, `[H, i, j]`, of cumulated log decays.

    They are 0 for j > i.
    """
    later = torch.ones(
        decay_HL.shape[1], decay_HL.shape[1], dtype=torch.bool, device=decay_HL.device
    ).triu(1)
    return (decay_HL[:, :, None] - decay_HL[:, None, :]).masked_fill(later, -torch.inf).exp()


# ---------------------------------------------------------------------------------------------------------- convolution
def conv_torch(
    state_PKC: Tensor, rows: PackedRows, x_NC: Tensor, taps_KC: Tensor, bias_C: Tensor | None
) -> Tensor:
    """Compute `scans.conv_scan` in torch: its twin."""

    def step(before_SKC: Tensor, x_SC: Tensor) -> tuple[Tensor, Tensor]:
        window_SKC = torch.cat((before_SKC, x_SC.unsqueeze(1)), dim=1)
        return _tap(list(window_SKC.unbind(1)), taps_KC, bias_C), window_SKC[:, 1:]

    def chunk(before_KC: Tensor, x_LC: Tensor) -> tuple[Tensor, Tensor]:
        long_LC = torch.cat((before_KC, x_LC))
        shifted = [long_LC[k : k + len(x_LC)] for k in range(len(taps_KC))]
        return _tap(shifted, taps_KC, bias_C), long_LC[len(x_LC) :]

    return over_rows(state_PKC, rows, step, chunk, x_NC)


def _tap(shifted: list[Tensor], taps_KC: Tensor, bias_C: Tensor | None) -> Tensor:
    out = shifted[0] * taps_KC[0]
    for x, tap_C in zip(shifted[1:], taps_KC[1:], strict=True):
        out.addcmul_(x, tap_C)
    return out if bias_C is None else out.add_(bias_C)


# -------------------------------------------------------------------------------------------------------------- Mamba-2
def mamba2_torch(
    state_PHDM: Tensor,
    rows: PackedRows,
    x_NHD: Tensor,
    dt_NH: Tensor,
    a_H: Tensor,
    b_NGM: Tensor,
    c_NGM: Tensor,
) -> Tensor:
    """Compute `scans.mamba2_scan` in torch: its twin."""
    step, chunk = partial(_mamba2_step, a_H), partial(_mamba2_chunk, a_H)
    return over_rows(state_PHDM, rows, step, chunk, x_NHD, dt_NH, b_NGM, c_NGM)


def _mamba2_step(
    a_H: Tensor, state_SHDM: Tensor, x_SHD: Tensor, dt_SH: Tensor, b_SGM: Tensor, c_SGM: Tensor
) -> tuple[Tensor, Tensor]:
    per_group = len(a_H) // b_SGM.shape[1]
    b_SHM, c_SHM = (part.repeat_interleave(per_group, dim=1) for part in (b_SGM, c_SGM))
    state_SHDM = state_SHDM * (dt_SH * a_H).exp()[..., None, None]
    state_SHDM.addcmul_((dt_SH[..., None] * x_SHD).unsqueeze(-1), b_SHM.unsqueeze(2))
    return (state_SHDM @ c_SHM.unsqueeze(-1)).squeeze(-1), state_SHDM


def _mamba2_chunk(
    a_H: Tensor, state_HDM: Tensor, x_LHD: Tensor, dt_LH: Tensor, b_LGM: Tensor, c_LGM: Tensor
) -> tuple[Tensor, Tensor]:
    outs = []
    for part in zip(*(tokens.split(BLOCK) for tokens in (x_LHD, dt_LH, b_LGM, c_LGM)), strict=True):
        out, state_HDM = _mamba2_block(a_H, state_HDM, *part)
        outs.append(out)
    return torch.cat(outs), state_HDM


def _mamba2_block(
    a_H: Tensor, state_HDM: Tensor, x_LHD: Tensor, dt_LH: Tensor, b_LGM: Tensor, c_LGM: Tensor
) -> tuple[Tensor, Tensor]:
    per_group = len(a_H) // b_LGM.shape[1]
    x_HLD = (x_LHD * dt_LH[..., None]).transpose(0, 1)
    b_GLM, c_GLM = b_LGM.transpose(0, 1), c_LGM.transpose(0, 1)
    decay_HL = (dt_LH * a_H).T.cumsum(dim=1)
    scores_HLL = (c_GLM @ b_GLM.mT).repeat_interleave(per_group, dim=0) * pairwise_decay(decay_HL)
    c_HLM = c_GLM.repeat_interleave(per_group, dim=0) * decay_HL.exp()[..., None]
    y_HLD = scores_HLL @ x_HLD + c_HLM @ state_HDM.mT
    b_HLM = (
        b_GLM.repeat_interleave(per_group, dim=0) * (decay_HL[:, -1:] - decay_HL).exp()[..., None]
    )
    return y_HLD.transpose(0, 1), state_HDM * decay_HL[:, -1].exp()[
        :, None, None
    ] + x_HLD.mT @ b_HLM


# -------------------------------------------------------------------------------------------------------------- Mamba-1
def mamba1_torch(
    state_PCM: Tensor,
    rows: PackedRows,
    x_NC: Tensor,
    dt_NC: Tensor,
    a_CM: Tensor,
    b_NM: Tensor,
    c_NM: Tensor,
) -> Tensor:
    """Compute `scans.mamba1_scan` in torch: its twin."""
    step = partial(_mamba1_step, a_CM)
    return over_rows(state_PCM, rows, step, partial(token_by_token, step), x_NC, dt_NC, b_NM, c_NM)


def _mamba1_step(
    a_CM: Tensor, state_SCM: Tensor, x_SC: Tensor, dt_SC: Tensor, b_SM: Tensor, c_SM: Tensor
) -> tuple[Tensor, Tensor]:
    state_SCM = state_SCM * (dt_SC.unsqueeze(-1) * a_CM).exp_()
    state_SCM.addcmul_((dt_SC * x_SC).unsqueeze(-1), b_SM.unsqueeze(1))
    return (state_SCM * c_SM.unsqueeze(1)).sum(-1), state_SCM


# ----------------------------------------------------------------------------------------------------- gated delta rule
def delta_torch(
    state_PHDV: Tensor,
    rows: PackedRows,
    q_NKD: Tensor,
    k_NKD: Tensor,
    v_NHV: Tensor,
    decay: Tensor,
    beta_NH: Tensor,
) -> Tensor:
    """Compute `scans.delta_scan` in torch: its twin."""
    shared = v_NHV.shape[1] // q_NKD.shape[1]
    q_NHD, k_NHD = (x.repeat_interleave(shared, dim=1) for x in (q_NKD, k_NKD))
    chunk = _delta_chunk if decay.ndim == 2 else partial(token_by_token, _delta_step)
    return over_rows(state_PHDV, rows, _delta_step, chunk, q_NHD, k_NHD, v_NHV, decay, beta_NH)


def _delta_step(
    state_SHDV: Tensor, q_SHD: Tensor, k_SHD: Tensor, v_SHV: Tensor, decay: Tensor, beta_SH: Tensor
) -> tuple[Tensor, Tensor]:
    alpha = decay.exp()
    state_SHDV = state_SHDV * (alpha[..., None, None] if alpha.ndim == 2 else alpha[..., None])
    recalled_SHV = (k_SHD.unsqueeze(2) @ state_SHDV).squeeze(2)
    correction_SHV = (v_SHV - recalled_SHV) * beta_SH[..., None]
    state_SHDV.addcmul_(k_SHD.unsqueeze(-1), correction_SHV.unsqueeze(2))
    return (q_SHD.unsqueeze(2) @ state_SHDV).squeeze(2), state_SHDV


def _delta_chunk(state_HDV: Tensor, *inputs_L: Tensor) -> tuple[Tensor, Tensor]:
    outs = []
    for part in zip(*(x.split(BLOCK) for x in inputs_L), strict=True):
        out, state_HDV = _delta_block(state_HDV, *part)
        outs.append(out)
    return torch.cat(outs), state_HDV


def _delta_block(
    state_HDV: Tensor,
    q_LHD: Tensor,
    k_LHD: Tensor,
    v_LHV: Tensor,
    decay_LH: Tensor,
    beta_LH: Tensor,
) -> tuple[Tensor, Tensor]:
    q_HLD, k_HLD, v_HLV = (x.transpose(0, 1) for x in (q_LHD, k_LHD, v_LHV))
    beta_HL1 = beta_LH.T.unsqueeze(-1)
    decay_HL = decay_LH.T.cumsum(dim=1)
    between_HLL = pairwise_decay(decay_HL)
    since_start_HL1 = decay_HL.exp().unsqueeze(-1)
    system_HLL = (k_HLD * beta_HL1) @ k_HLD.mT * between_HLL
    recalled_HLV = (k_HLD * since_start_HL1) @ state_HDV
    correction_HLV = torch.linalg.solve_triangular(
        system_HLL, beta_HL1 * (v_HLV - recalled_HLV), upper=False, unitriangular=True
    )
    y_HLV = (q_HLD * since_start_HL1) @ state_HDV + (
        q_HLD @ k_HLD.mT * between_HLL
    ) @ correction_HLV
    to_end_HL1 = (decay_HL[:, -1:] - decay_HL).exp().unsqueeze(-1)
    after_HDV = (
        state_HDV * decay_HL[:, -1].exp()[:, None, None] + (k_HLD * to_end_HL1).mT @ correction_HLV
    )
    return y_HLV.transpose(0, 1), after_HDV
