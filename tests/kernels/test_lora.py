"""Mixed adapters on every instruction set of this CPU and in torch, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motet_kernels.linear.lora import LoraFactors
from motet_kernels.linear.pack import pack_linear
from motet_kernels.linear.segments import FREE, Segments
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.replay import Tape
from support.running.refusals import refuses

SLOTS = 5


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(inputs: int, outputs: int, room: int, dtype: torch.dtype = torch.float32) -> LoraFactors:
    """Slot s has an adapter of its own rank; the last one none."""
    factors = LoraFactors(SLOTS, room, inputs, outputs, dtype)
    for slot in range(SLOTS - 1):
        rank = 1 + (slot * 7) % room
        factors.put(
            slot, random(rank, inputs, seed=slot), random(outputs, rank, seed=10 + slot), 0.5 + slot
        )
    return factors


def expected(factors: LoraFactors, x: Tensor, out: Tensor, slots: list[int]) -> Tensor:
    rows = []
    for row, base, slot in zip(x.double(), out.double(), slots, strict=True):
        if slot != FREE:
            down, up = factors.factors(slot)
            base = base + float(factors.scales_S[slot]) * (up.double() @ (down.double() @ row))
        rows.append(base)
    return torch.stack(rows) if rows else out.double()


@settings(max_examples=10)
@given(
    slots=st.lists(st.integers(FREE, SLOTS - 1), max_size=40),
    inputs=st.sampled_from([1, 15, 64, 300]),
    outputs=st.sampled_from([1, 31, 64, 270]),
    room=st.sampled_from([1, 4, 9, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    narrow=st.booleans(),
)
def test_equals_float64(
    backend: str,
    slots: list[int],
    inputs: int,
    outputs: int,
    room: int,
    dtype: torch.dtype,
    narrow: bool,
) -> None:
    factors = made(inputs, outputs, room, dtype)
    x = random(len(slots), inputs + 3, seed=1)[:, 2 : inputs + 2].to(
        torch.bfloat16 if narrow else torch.float32
    )
    held = random(len(slots), outputs + 4, seed=2).to(x.dtype)
    before, out = held.clone(), held[:, 1 : outputs + 1]
    due = expected(factors, x, out, slots)
    factors.add(x, out, Segments.of(slots))
    tolerance = 2e-2 if narrow else 1e-5
    scale = (inputs * room) ** 0.5 * SLOTS
    torch.testing.assert_close(out.double(), due, rtol=tolerance, atol=tolerance * scale)
    assert torch.equal(held[:, 0], before[:, 0])
    assert torch.equal(held[:, outputs + 1 :], before[:, outputs + 1 :])
    free = [row for row, slot in enumerate(slots) if slot in (FREE, SLOTS - 1)]
    assert torch.equal(held[free], before[free])


@pytest.mark.parametrize("threads", [1, 2])
def test_native_bits_do_not_depend_on_company(isa: str, threads: int) -> None:
    torch.set_num_threads(threads)
    factors = made(512, 700, 16)
    slots = [0, 2, 2, FREE, 1, 2, 2, 2, 3, 2, 0, 2, 2]
    x, base = random(len(slots), 512, seed=1), random(len(slots), 700, seed=2)
    whole = base.clone()
    factors.add(x, whole, Segments.of(slots))
    for row, slot in enumerate(slots):
        alone = base[row : row + 1].clone()
        factors.add(x[row : row + 1], alone, Segments.of([slot]))
        assert torch.equal(alone[0], whole[row])
    torch.set_num_threads(1)


def test_a_part_of_a_joined_product_is_changed_in_place(backend: str) -> None:
    factors = made(32, 64, 8)
    x, joined = random(1, 3, 32), random(1, 3, 160, seed=3)
    before = joined.clone()
    due = expected(factors, x[0], joined[0, :, 48:112], [1, FREE, 0])
    factors.add(x, joined[..., 48:112], Segments.of([1, FREE, 0]))
    torch.testing.assert_close(joined[0, :, 48:112].double(), due, rtol=1e-5, atol=1e-4)
    assert torch.equal(joined[..., :48], before[..., :48])
    assert torch.equal(joined[..., 112:], before[..., 112:])


def test_a_slot_is_used_again(backend: str) -> None:
    factors = LoraFactors(2, 8, 20, 40, torch.float32)
    x = random(3, 20, seed=4)
    for rank in (8, 2, 5):
        factors.put(1, random(rank, 20, seed=rank), random(40, rank, seed=rank + 1), 1.5)
        out = torch.zeros(3, 40)
        due = expected(factors, x, out, [1, 1, 1])
        factors.add(x, out, Segments.of([1, 1, 1]))
        assert int(factors.factors(1)[0].any(1).sum()) == rank
        torch.testing.assert_close(out.double(), due, rtol=1e-5, atol=1e-4)
    factors.clear(1)
    out = torch.zeros(3, 40)
    factors.add(x, out, Segments.of([1, 1, 1]))
    assert not out.any()


@torch.inference_mode()
def test_a_tape_takes_another_mix_each_time(isa: str) -> None:
    factors = made(64, 96, 8)
    linear = pack_linear(random(96, 64, seed=6), None, "float32")
    x, segments = random(4, 64, seed=7), Segments.of([FREE] * 4)

    def step() -> Tensor:
        out = linear(x)
        factors.add(x, out, segments)
        return out

    tape = Tape(step)
    for number, slots in enumerate(([0, 1, 2, 3], [FREE] * 4, [2, FREE, 2, 2])):
        x.copy_(random(4, 64, seed=20 + number))
        segments.write(Segments.of(slots))
        due = linear(x)
        factors.add(x, due, Segments.of(slots))
        assert torch.equal(tape.replay(), due)


def test_what_does_not_fit_is_named(isa: str) -> None:
    factors = LoraFactors(2, 8, 20, 40, torch.float32)
    with refuses(KernelError, "down_rK"):
        factors.put(0, torch.zeros(9, 20), torch.zeros(40, 9), 1.0)
    with refuses(KernelError, "slots"):
        LoraFactors(0, 8, 20, 40, torch.float32)
    x, out = torch.zeros(2, 20), torch.zeros(2, 40)
    with refuses(KernelError, "segments"):
        factors.add(x, out, Segments.of([0, 2]))
    with refuses(KernelError, "segments"):
        factors.add(x, out, Segments.of([0, 0, 0]))
    with refuses(KernelError, "x"):
        factors.add(x, torch.zeros(2, 41), Segments.of([0, 0]))
    with refuses(KernelError, "x"):
        factors.add(x.double(), out.double(), Segments.of([0, 0]))
