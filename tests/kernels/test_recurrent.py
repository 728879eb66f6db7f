"""The recurrences on every instruction set of this CPU and in torch, against plain loops in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motet_kernels.recurrent.packed_rows import PackedRows
from motet_kernels.recurrent.scans import conv_scan, delta_scan, mamba1_scan, mamba2_scan
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

SLOTS = 5


@dataclass
class Case:
    """A recurrence with its constants: `scan(state, rows, *inputs)` and one token of it in float64."""

    scan: Callable[..., Tensor]
    state_shape: tuple[int, ...]
    input_shapes: list[tuple[int, ...]]
    token: Callable[..., tuple[Tensor, Tensor]]

    def inputs(self, tokens: int, seed: int) -> list[Tensor]:
        """Of all inputs in one tensor, as a projection gives them: strided by token."""
        generator = torch.Generator().manual_seed(seed)
        sizes = [torch.Size(shape).numel() for shape in self.input_shapes]
        together = torch.rand(tokens, sum(sizes) + 3, generator=generator) - 0.5
        parts = together[:, : sum(sizes)].split(sizes, dim=1)
        return [
            part.unflatten(1, shape) for part, shape in zip(parts, self.input_shapes, strict=True)
        ]

    def expected(
        self, state: Tensor, rows: PackedRows, inputs: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Outputs and states, one token after the other in float64."""
        after, outs = state.double(), []
        for row, slot in enumerate(rows.slots_B.tolist()):
            for t in range(rows.starts[row], rows.starts[row + 1]):
                out, after[slot] = self.token(after[slot], *(x[t].double() for x in inputs))
                outs.append(out)
        return torch.stack(outs), after


def conv_case(channels: int, taps: int, bias: bool) -> Case:
    generator = torch.Generator().manual_seed(1)
    taps_KC = torch.randn(taps, channels, generator=generator)
    bias_C = torch.randn(channels, generator=generator) if bias else None

    def scan(state: Tensor, rows: PackedRows, x_NC: Tensor) -> Tensor:
        return conv_scan(state, rows, x_NC, taps_KC, bias_C)

    def token(state: Tensor, x_C: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat((state, x_C[None]))
        out = (window * taps_KC.double()).sum(0)
        return out if bias_C is None else out + bias_C.double(), window[1:]

    return Case(scan, (taps - 1, channels), [(channels,)], token)


def mamba2_case(heads: int, dim: int, groups: int, state_dim: int) -> Case:
    a_H = -torch.rand(heads, generator=torch.Generator().manual_seed(1)) * 2

    def scan(
        state: Tensor, rows: PackedRows, x: Tensor, dt: Tensor, b: Tensor, c: Tensor
    ) -> Tensor:
        return mamba2_scan(state, rows, x, dt.abs(), a_H, b, c)

    def token(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        b, c = (part.repeat_interleave(heads // groups, 0) for part in (b, c))
        decay = (dt.abs() * a_H.double()).exp()[:, None, None]
        state = decay * state + dt.abs()[:, None, None] * x[:, :, None] * b[:, None, :]
        return (state * c[:, None, :]).sum(-1), state

    shapes: list[tuple[int, ...]] = [
        (heads, dim),
        (heads,),
        (groups, state_dim),
        (groups, state_dim),
    ]
    return Case(scan, (heads, dim, state_dim), shapes, token)


def mamba1_case(channels: int, state_dim: int) -> Case:
    a_CM = -torch.rand(channels, state_dim, generator=torch.Generator().manual_seed(1)) * 2

    def scan(
        state: Tensor, rows: PackedRows, x: Tensor, dt: Tensor, b: Tensor, c: Tensor
    ) -> Tensor:
        return mamba1_scan(state, rows, x, dt.abs(), a_CM, b, c)

    def token(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        dt = dt.abs()[:, None]
        state = (dt * a_CM.double()).exp() * state + dt * x[:, None] * b
        return (state * c).sum(-1), state

    return Case(
        scan, (channels, state_dim), [(channels,), (channels,), (state_dim,), (state_dim,)], token
    )


def delta_case(heads: int, key_heads: int, dim: int, value_dim: int, per_dim: bool) -> Case:
    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    def scan(
        state: Tensor, rows: PackedRows, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> Tensor:
        return delta_scan(state, rows, q, unit(k), v, -g.abs(), beta.abs() * 2)

    def token(
        state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k = (x.repeat_interleave(heads // key_heads, 0) for x in (q, unit(k)))
        state = state * (-g.abs()).exp().view(heads, -1, 1)
        correction = (v - (k[:, :, None] * state).sum(1)) * beta.abs()[:, None] * 2
        state = state + k[:, :, None] * correction[:, None, :]
        return (q[:, :, None] * state).sum(1), state

    decay = (heads, dim) if per_dim else (heads,)
    shapes: list[tuple[int, ...]] = [
        (key_heads, dim),
        (key_heads, dim),
        (heads, value_dim),
        decay,
        (heads,),
    ]
    return Case(scan, (heads, dim, value_dim), shapes, token)


CASES = {
    "conv": conv_case(64, 4, bias=True),
    "conv odd": conv_case(301, 3, bias=False),
    "mamba1": mamba1_case(32, 16),
    "mamba1 odd": mamba1_case(37, 5),
    "mamba2": mamba2_case(4, 16, 2, 32),
    "mamba2 odd": mamba2_case(3, 7, 1, 19),
    "delta": delta_case(4, 2, 16, 64, per_dim=False),
    "delta odd": delta_case(3, 1, 9, 75, per_dim=False),
    "delta per dim": delta_case(2, 2, 16, 32, per_dim=True),
    "delta per dim odd": delta_case(2, 1, 5, 17, per_dim=True),
}


def start_state(case: Case) -> Tensor:
    return torch.randn(SLOTS, *case.state_shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=8)
@given(
    lengths=st.lists(st.sampled_from([1, 1, 2, 3, 40, 70]), min_size=1, max_size=SLOTS),
    seed=st.integers(0, 99),
)
def test_rows_advance_as_in_float64(backend: str, name: str, lengths: list[int], seed: int) -> None:
    case = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    rows = PackedRows(torch.randperm(SLOTS, generator=generator)[: len(lengths)], starts)
    state, inputs = start_state(case), case.inputs(starts[-1], seed)
    expected, after = case.expected(state, rows, inputs)
    out = case.scan(state, rows, *inputs)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(state.double(), after, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_native_bits_do_not_depend_on_cuts_or_company(isa: str, name: str, threads: int) -> None:
    torch.set_num_threads(threads)
    case = CASES[name]
    inputs = case.inputs(90, 0)
    whole, cut = start_state(case), start_state(case)
    expected = case.scan(whole, PackedRows(torch.tensor([3]), [0, 90]), *inputs)
    outs = []
    for start, stop in ((0, 1), (1, 50), (50, 51), (51, 90)):
        part = [x[start:stop] for x in inputs]
        other = case.inputs(7, 1)
        rows = PackedRows(torch.tensor([0, 3, 1]), [0, 1, 1 + stop - start, 7 + stop - start])
        mixed = [torch.cat((b[:1], a, b[1:])) for a, b in zip(part, other, strict=True)]
        outs.append(case.scan(cut, rows, *mixed)[1 : 1 + stop - start])
    torch.set_num_threads(1)
    assert torch.equal(torch.cat(outs), expected)
    assert torch.equal(cut[3], whole[3])


@pytest.mark.parametrize("name", CASES)
def test_nan_stays_in_its_row(backend: str, name: str) -> None:
    case = CASES[name]
    rows = PackedRows(torch.tensor([0, 1, 2]), [0, 1, 2, 9])
    inputs, state = case.inputs(9, 0), start_state(case)
    poisoned, clean = [x.clone() for x in inputs], state.clone()
    for x in poisoned:
        x[0] = x[4] = torch.nan
    out, expected = case.scan(state, rows, *poisoned), case.scan(clean, rows, *inputs)
    assert torch.equal(out[1], expected[1])
    assert out[0].isnan().all()
    assert torch.equal(state[[1, 3, 4]], clean[[1, 3, 4]])


@pytest.mark.parametrize("name", CASES)
def test_empty_step(backend: str, name: str) -> None:
    case = CASES[name]
    state = start_state(case)
    out = case.scan(state, PackedRows(torch.zeros(0, dtype=torch.long), [0]), *case.inputs(0, 0))
    assert len(out) == 0
    assert torch.equal(state, start_state(case))


@pytest.mark.parametrize("slot", [-1, SLOTS])
@pytest.mark.parametrize("name", ["conv", "mamba1", "mamba2", "delta"])
def test_slot_outside_of_the_cache_is_refused_before_anything_is_written(
    backend: str, name: str, slot: int
) -> None:
    case = CASES[name]
    state = start_state(case)
    rows = PackedRows(torch.tensor([0, slot]), [0, 1, 2])
    with refuses(KernelError, "slots_B[1]"):
        case.scan(state, rows, *case.inputs(2, 0))
    assert torch.equal(state, start_state(case))


def test_errors_name_the_argument() -> None:
    rows = PackedRows(torch.tensor([0]), [0, 2])
    state, x, taps = torch.zeros(1, 2, 8), torch.zeros(2, 8), torch.zeros(3, 8)
    with refuses(KernelError, "x_NC"):
        conv_scan(state, rows, x.bfloat16(), taps, None)
    with refuses(KernelError, "x_NC"):
        conv_scan(state, rows, torch.zeros(2, 9), taps, None)
    with refuses(KernelError, "x_NC"):
        conv_scan(state, rows, torch.zeros(8, 2).T, taps, None)
    with refuses(KernelError, "taps_KC"):
        conv_scan(state, rows, x, taps.bfloat16(), None)
    with refuses(KernelError, "bias_C"):
        conv_scan(state, rows, x, taps, torch.zeros(7))
    with refuses(KernelError, "state_PKC"):
        conv_scan(torch.zeros(1, 3, 8), rows, x, taps, None)
    with refuses(KernelError, "slots_B"):
        PackedRows(torch.tensor([0, 1]), [0, 2])
    with refuses(KernelError, "groups"):
        mamba2_scan(
            torch.zeros(1, 3, 4, 8), rows, torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(3),
            torch.zeros(2, 2, 8), torch.zeros(2, 2, 8),
        )  # fmt: skip
