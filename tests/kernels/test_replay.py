"""Tapes: a step that is replayed computes what it would compute, and nothing that cannot be replayed is recorded."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from motet_kernels.attention.kv import store_kv
from motet_kernels.attention.paged_attention import paged_attention
from motet_kernels.attention.paged_batch import PagedBatch
from motet_kernels.gates import gated, gelu
from motet_kernels.linear.activated_linear import MANY_ROWS, gated_linear
from motet_kernels.linear.pack import FORMATS, pack_linear
from motet_kernels.norm import layer_norm, rms_norm
from motet_kernels.runtime import native
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.replay import Tape, Workspace, can_replay
from support.running.refusals import refuses

HEADS, DIM, SLOTS = 2, 8, 4
WIDTH = HEADS * DIM


class Step:
    """A layer that has all kinds of kernels: `x`, `slots` and `lengths` are written between two runs."""

    def __init__(self, form: str, rows: int):
        draw = torch.Generator().manual_seed(rows)
        self.rows = rows
        self.qkv, self.out, self.up = (
            pack_linear(
                torch.randn(n, WIDTH, generator=draw) * 0.3, torch.randn(n, generator=draw), form
            )
            for n in (3 * WIDTH, WIDTH, 2 * WIDTH)
        )
        self.weight = torch.randn(WIDTH, generator=draw)
        self.keys, self.values = torch.zeros(2, rows, HEADS, SLOTS, DIM).unbind()
        self.x, self.slots = torch.zeros(rows, WIDTH), torch.zeros(rows, dtype=torch.int64)
        starts, tables = (
            torch.arange(rows + 1, dtype=torch.int32),
            torch.arange(rows, dtype=torch.int32)[:, None],
        )
        self.batch = PagedBatch(tables, starts, torch.ones(rows, dtype=torch.int32))

    def write(self, position: int, seed: int) -> None:
        self.x.copy_(torch.randn(self.x.shape, generator=torch.Generator().manual_seed(seed)))
        self.slots.copy_(torch.arange(self.rows) * SLOTS + position)
        self.batch.lengths_B.fill_(position + 1)

    def run(self) -> Tensor:
        normed = layer_norm(self.x, self.weight, self.weight, 1e-5)
        query, key, value = self.qkv(normed).unflatten(1, (3, HEADS, -1)).unbind(1)
        store_kv(key, value, self.keys, self.values, self.slots)
        attended = paged_attention(query, self.keys, self.values, self.batch, scale=0.3)
        x = self.out(attended.flatten(1), self.x)
        return rms_norm(gelu(gated(self.up(x), "silu")), self.weight, 1e-6)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_a_replayed_step_is_the_step(isa: str, form: str, rows: int) -> None:
    taped, plain = Step(form, rows), Step(form, rows)
    taped.write(0, 0)
    plain.write(0, 0)
    tape = Tape(taped.run)
    assert torch.equal(tape.result, plain.run())
    for position in range(1, SLOTS):
        taped.write(position, position)
        plain.write(position, position)
        assert torch.equal(tape.replay(), plain.run())
        assert torch.equal(taped.keys, plain.keys)


def test_results_are_overwritten_and_memory_is_kept() -> None:
    step = Step("float32", 2)
    step.write(0, 0)
    tape = Tape(step.run)
    before, address = tape.result.clone(), tape.result.data_ptr()
    others = [
        torch.full((2, WIDTH), float("nan")) for _ in range(50)
    ]  # would lie where a step's memory was freed
    step.write(0, 1)
    assert tape.replay().data_ptr() == address
    assert not torch.equal(tape.result, before)
    assert all(bool(other.isnan().all()) for other in others)


def test_tapes_in_one_workspace_use_the_same_memory() -> None:
    """Its chunks hold the larger step, which is recorded last, too; both are replayed in turn."""
    workspace = Workspace()
    workspace.place(torch.empty(1))  # a recording begins at the beginning all the same
    steps = [(Step("float32", rows), Step("float32", rows)) for rows in (2, 40)]
    tapes = []
    for taped, plain in steps:
        taped.write(0, 0)
        plain.write(0, 0)
        plain.run()
        tapes.append(Tape(taped.run, workspace))
    for position in range(1, SLOTS):
        for (taped, plain), tape in zip(steps, tapes, strict=True):
            taped.write(position, position)
            plain.write(position, position)
            assert torch.equal(tape.replay(), plain.run())
    first, second = (
        {one.untyped_storage().data_ptr() for one in tape._kept if isinstance(one, Tensor)}
        for tape in tapes
    )
    assert first & second


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
@torch.inference_mode()
def test_a_gated_product_of_many_rows_is_replayed(isa: str, form: str) -> None:
    linear = pack_linear(torch.randn(128, WIDTH), None, form)
    x = torch.randn(MANY_ROWS, WIDTH)
    tape = Tape(lambda: gated_linear(linear, x, "silu"))
    x.copy_(torch.randn(MANY_ROWS, WIDTH))
    assert torch.equal(tape.replay(), gated_linear(linear, x, "silu"))
    assert tape._names == ["motet_linear_activated"]


def test_rising_sizes_leave_little_behind() -> None:
    workspace, most = Workspace(), 0
    for rows in range(1, 65):
        workspace.rewind()
        for width in (1024, 24_576, 12_288, 4096):
            workspace.place(torch.empty(rows, width))
        most = rows * 4 * (1024 + 24_576 + 12_288 + 4096)
    assert sum(len(chunk) for chunk in workspace._chunks) < 4 * most


def test_a_workspace_places_what_is_larger_than_its_chunks() -> None:
    workspace = Workspace()
    small = workspace.place(torch.empty(3))
    large = workspace.place(torch.empty(1 << 19, 2).t())
    assert (large.shape, large.stride()) == ((2, 1 << 19), (1, 2))
    again = workspace.rewind().place(torch.empty(2, dtype=torch.bfloat16))
    assert again.data_ptr() == small.data_ptr()
    assert workspace.place(torch.empty(5)).data_ptr() % 64 == 0


@pytest.mark.parametrize(
    "compute",
    [lambda x: x + 1, lambda x: x.clone(), lambda x: x.add_(1), lambda x: x.t().flatten()],
)
def test_what_torch_computes_is_refused(compute: object) -> None:
    x = torch.ones(2, 3)
    with refuses(KernelError, "step"):
        Tape(lambda: compute(x))  # type: ignore[operator]
    gelu(x)  # nobody notes it


def test_a_kernel_without_an_entry_for_tapes_is_refused() -> None:
    table = pack_linear(torch.randn(4, 8), None, "float32")
    ids = torch.tensor([1, 2])
    with pytest.raises(KernelError) as caught:
        Tape(lambda: table.rows(ids))
    assert caught.value.param in ("step", "motet_linear_rows")


def test_a_refused_call_is_named() -> None:
    step = Step("int8", 2)
    step.write(0, 0)
    tape = Tape(step.run)
    step.slots[1] = 2 * SLOTS
    with refuses(KernelError, "motet_store_kv"):
        tape.replay()


def test_another_thread_is_not_recorded() -> None:
    step, other = Step("float32", 1), torch.randn(1, WIDTH)

    def both() -> Tensor:
        thread = threading.Thread(target=lambda: gelu(other))
        thread.start()
        thread.join()
        return gelu(step.x)

    step.write(0, 0)
    tape = Tape(both)
    assert tape._names == ["motet_gate"]


def test_without_the_native_library_there_are_no_tapes() -> None:
    native.select("off")
    try:
        assert not can_replay()
        with refuses(KernelError, "step"):
            Tape(Step("float32", 1).run)
    finally:
        native.select("")
    assert can_replay()
