"""Replay decode steps as CUDA graphs, without launching their kernels one by one from Python.

A graph computes a fixed number of rows, one token each (`motet_models.graph_sizes`). A step writes
its token ids, positions, slots, block tables and lengths into the graph's input tensors; rows that
it does not need have one key in the null block, which is zero, and a slot at which nothing is
stored. Everything that depends on data is left to the step around: drafts, grammars, sampling,
adapters, pictures, watched queries. A model that cannot be captured, for example because its
experts are chosen on the host, is computed kernel by kernel, as without graphs.

Shapes: B rows of a step, R rows of its graph, M blocks per row, G groups of layers, V vocabulary,
X hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from motet_kernels.attention.kv import NO_SLOT
from motet_kernels.attention.paged_batch import PagedBatch
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.graphs import Graph, Graphs
from motet_kernels.spans import upload
from motet_llm.attention.paged import GroupStep, StepLayout
from motet_llm.attention.sink_window import Rows
from motet_llm.cache.kv_cache import KvCache
from motet_llm.scheduling.work import Work
from motet_models.graph_sizes import GraphSize, size_for

log = logging.getLogger(__name__)

_ALIGNED = 2  # int64 elements in 16 bytes, the alignment that Triton specializes on

# Computes token ids `[R]` at positions `[R]` or `[3, R]`: logits `[R, V]`, hidden states `[R, X]`.
Compute = Callable[[Tensor, Tensor, StepLayout, Tensor], tuple[Tensor, Tensor]]


def is_plain_decode(works: Sequence[Work]) -> bool:
    """Return True if every work computes one token of text and draws, without draft or adapter."""
    return all(
        work.num_tokens == 1
        and work.draws
        and work.request.adapter is None
        and (work.request.images is None or not len(work.request.images.between(*work.span)[0]))
        for work in works
    )


class DecodeGraphs:
    """Hold the graphs of one model over one KV cache.

    sizes: of the graphs, the smallest first. axes: of positions. All are captured by `capture`, or
    else each when a step first needs it.
    """

    def __init__(
        self,
        compute: Compute,
        kv: KvCache,
        graphs: Graphs,
        sizes: Sequence[GraphSize],
        device: torch.device,
        *,
        axes: int = 1,
    ):
        self._compute, self._kv, self._graphs, self._device = compute, kv, graphs, device
        self._sizes, self._axes = sizes, axes
        self._captured: dict[GraphSize, _DecodeGraph] = {}
        self._results: tuple[Tensor, Tensor] | None = None
        self._refusal = ""  # why nothing is captured
        self._steps = 0

    def capture(self) -> None:
        """Capture all sizes, the largest first, so that the others find memory for their steps."""
        for size in reversed(self._sizes):
            self._graph(size)

    def run(
        self,
        ids_B: np.ndarray,
        positions: np.ndarray,
        slots: Sequence[np.ndarray],
        rows: Sequence[Rows],
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return logits `[B, V]`, hidden states `[B, X]` and the places that draw `[B]`: all of them.

        The next step overwrites them. None if no graph holds the step.

        positions: `[B]` or `[3, B]`. slots, rows: by group, of one token per row.
        """
        blocks = max(row.tables_BM.shape[1] for row in rows)
        size = size_for(self._sizes, len(ids_B), blocks)
        graph = None if size is None else self._graph(size)
        if graph is None:
            return None
        graph.write(ids_B, positions, slots, rows)
        graph.replay()
        self._steps += 1
        assert self._results is not None
        logits_RV, hidden_RX, draws_R = (*self._results, graph.draws_R)
        return logits_RV[: len(ids_B)], hidden_RX[: len(ids_B)], draws_R[: len(ids_B)]

    def stats(self) -> dict[str, float]:
        """Return how many graphs there are, and how many steps were replayed."""
        return {"graphs": len(self._captured), "graph_steps": self._steps}

    def describe(self) -> str:
        """Return for people how many graphs there are, or why there are none."""
        return f"off: {self._refusal}" if self._refusal else "on"

    def _graph(self, size: GraphSize) -> _DecodeGraph | None:
        if self._refusal:
            return None
        if size not in self._captured:
            try:
                self._captured[size] = self._capture(size)
            except (KernelError, RuntimeError) as error:
                self._refusal, self._captured = str(error), {}
                log.warning("decode steps are not captured as graphs", extra={"reason": str(error)})
                return None
        return self._captured[size]

    def _capture(self, size: GraphSize) -> _DecodeGraph:
        graph = _DecodeGraph(size, self._kv, self._device, self._axes)

        def step() -> None:
            found = self._compute(graph.ids_R, graph.positions, graph.layout, graph.draws_R)
            for into, result in zip(self._results_like(found), found, strict=True):
                into[: size.rows].copy_(result)

        graph.graph = self._graphs.capture(step)
        return graph

    def _results_like(self, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the memory of all graphs' results, allocated when the first step is computed."""
        if self._results is None:
            rows = max(size.rows for size in self._sizes)
            logits, hidden = (one.new_zeros(rows, *one.shape[1:]) for one in found)
            self._results = logits, hidden
        return self._results


class _DecodeGraph:
    """Hold the inputs of one size at fixed addresses, and the graph that reads them."""

    graph: Graph

    def __init__(self, size: GraphSize, kv: KvCache, device: torch.device, axes: int):
        self._size, self._kv, self._device, self._axes = size, kv, device, axes
        groups, width = len(kv.groups), -(-size.rows // _ALIGNED) * _ALIGNED
        self._numbers = torch.zeros(1 + axes + groups, width, dtype=torch.int64, device=device)
        rows = self._numbers[:, : size.rows]
        self.ids_R, slots = rows[0], rows[1 + axes :]
        self.positions = rows[1] if axes == 1 else rows[1 : 1 + axes]
        self.draws_R = torch.arange(size.rows, device=device)
        starts = torch.arange(size.rows + 1, dtype=torch.int32)
        self._batches = [
            PagedBatch(tables_RM, starts, lengths_R).to(device)
            for tables_RM, lengths_R in self._padding()
        ]
        slots.fill_(NO_SLOT)
        self.layout = StepLayout(
            kv, [GroupStep(s, b) for s, b in zip(slots, self._batches, strict=True)]
        )
        self.layout.positions_N = self.positions if axes == 1 else None

    def _padding(self) -> list[tuple[Tensor, Tensor]]:
        """Return for each group tables `[R, M]` and lengths `[R]` of rows that are not needed."""
        (rows, blocks), null = (self._size.rows, self._size.blocks), self._kv.null_block
        return [
            (
                torch.full((rows, blocks), null, dtype=torch.int32),
                torch.ones(rows, dtype=torch.int32),
            )
            for _ in self._kv.groups
        ]

    def write(
        self,
        ids_B: np.ndarray,
        positions: np.ndarray,
        slots: Sequence[np.ndarray],
        rows: Sequence[Rows],
    ) -> None:
        """Write a step, and padding into the other rows; does not wait for the GPU."""
        count, axes = len(ids_B), self._axes
        numbers = np.zeros(tuple(self._numbers.shape), dtype=np.int64)
        numbers[0, :count], numbers[1 : 1 + axes, :count] = ids_B, positions
        numbers[1 + axes :] = NO_SLOT
        numbers[1 + axes :, :count] = np.stack(slots)
        self._numbers.copy_(upload(torch.from_numpy(numbers), self._device))
        for (tables_RM, lengths_R), row in zip(padding := self._padding(), rows, strict=True):
            tables_RM[:count, : row.tables_BM.shape[1]] = row.tables_BM
            lengths_R[:count] = row.lengths_B
        packed = torch.cat([part.flatten() for pair in padding for part in pair])
        sizes = [part.numel() for pair in padding for part in pair]
        parts = iter(upload(packed, self._device).split(sizes))
        for batch in self._batches:
            batch.tables_BM.copy_(next(parts).view_as(batch.tables_BM))
            batch.lengths_B.copy_(next(parts))

    def replay(self) -> None:
        self.graph.replay()
