"""Runs the model over the packed tokens of one step.

Shapes: N packed tokens, R rows that draw a token, V vocabulary, B rows, M blocks per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from motet_shared.errors import ConfigError

from . import checkpoint
from .attention import Layout, Rows, ShapeProbe, StepLayout
from .config import EngineConfig
from .kv_cache import KvCache, LayerShape, bytes_per_block
from .scheduler import Work


@dataclass(slots=True, frozen=True)
class Forward:
    """Logits `[R, V]` of the works that draw, in order; and whether each work's hidden states were all finite."""

    logits_RV: Tensor
    finite: list[bool]


class ModelRunner:
    """The model, its KV cache, and the way from a list of `Work` to logits."""

    def __init__(self, config: EngineConfig):
        folder = Path(config.model)
        if config.threads:
            torch.set_num_threads(config.threads)
        model_config = checkpoint.load_config(folder)
        self.context = checkpoint.context_of(model_config, config.context)
        self.dtype = checkpoint.resolve_dtype(model_config, config.dtype)
        self.eos_ids = checkpoint.eos_ids(folder, model_config)
        self.vocab: int = model_config.vocab_size
        self._model = checkpoint.load_model(folder, model_config, self.dtype)
        self._model.base_model.register_forward_hook(self._keep_hidden)
        self._hidden_1ND = torch.empty(0)
        layers = self._probe_layers(model_config.num_hidden_layers)
        num_blocks = config.num_blocks or self._blocks_in_memory(config, layers)
        self.kv = KvCache(layers, num_blocks, config.block_size, self.dtype)

    def _keep_hidden(self, _module: Any, _args: Any, output: Any) -> None:
        self._hidden_1ND = output[0]

    @torch.inference_mode()
    def _probe_layers(self, num_layers: int) -> list[LayerShape]:
        probe = ShapeProbe()
        self._call(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), probe, torch.zeros(1).long())
        if sorted(probe.layers) != list(range(num_layers)):
            raise ConfigError(
                f"model_type={self._model.config.model_type!r} is not supported: "
                f"only layers {sorted(probe.layers)} of {num_layers} use attention"
            )
        return [probe.layers[layer] for layer in range(num_layers)]

    def _blocks_in_memory(self, config: EngineConfig, layers: list[LayerShape]) -> int:
        """As many blocks as `kv_memory` holds, but no more than `max_running` requests of full length can use."""
        num_blocks = config.kv_memory // bytes_per_block(layers, config.block_size, self.dtype)
        if num_blocks < 1:
            raise ConfigError(f"kv_memory={config.kv_memory}: does not hold one block; give more")
        return min(num_blocks, config.max_running * -(-self.context // config.block_size))

    @torch.inference_mode()
    def forward(self, works: list[Work]) -> Forward:
        """Compute `works`: those of a single token first, as the scheduler gives them."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        draws: list[int] = []
        for work in works:
            request, start = work.request, work.request.num_computed
            span = range(start, start + work.num_tokens)
            ids += request.tokens[span.start : span.stop]
            positions += span
            slots += self._slots(request.block_table, span)
            if work.draws:
                draws.append(len(ids) - 1)
        positions_N = torch.tensor(positions)
        layout = StepLayout(self.kv, torch.tensor(slots), self._rows(works, positions_N))
        logits_RV = self._call(torch.tensor(ids), positions_N, layout, torch.tensor(draws, dtype=torch.long))
        return Forward(logits_RV, self._finite(works))

    def _call(self, ids_N: Tensor, positions_N: Tensor, layout: Layout, draws_R: Tensor) -> Tensor:
        output = self._model(
            input_ids=ids_N.unsqueeze(0),
            position_ids=positions_N.unsqueeze(0),
            use_cache=False,
            logits_to_keep=draws_R,
            layout=layout,
        )
        return output.logits[0]

    def _slots(self, table: list[int], span: range) -> list[int]:
        size = self.kv.block_size
        return [table[position // size] * size + position % size for position in span]

    def _rows(self, works: list[Work], positions_N: Tensor) -> list[Rows]:
        """All single tokens make one group, every longer chunk one of its own."""
        single = next((i for i, work in enumerate(works) if work.num_tokens > 1), len(works))
        rows = [self._group(works[:single], 0, positions_N)] if single else []
        start = single
        for work in works[single:]:
            rows.append(self._group([work], start, positions_N))
            start += work.num_tokens
        return rows

    def _group(self, works: list[Work], start: int, positions_N: Tensor) -> Rows:
        queries = works[0].num_tokens
        tables = []
        for work in works:
            used = -(-(work.request.num_computed + queries) // self.kv.block_size)
            tables.append(work.request.block_table[:used])
        width = max(map(len, tables))
        null = self.kv.null_block
        padded = chain.from_iterable(table + [null] * (width - len(table)) for table in tables)
        tables_BM = torch.tensor(list(padded)).view(len(works), width)
        positions_BQ = positions_N[start : start + queries * len(works)].view(len(works), queries)
        return Rows(start, queries, tables_BM, positions_BQ)

    def _finite(self, works: list[Work]) -> list[bool]:
        """Per work: no NaN or infinity in its tokens' last hidden states, hence none in the cache either."""
        finite_N = self._hidden_1ND[0].sum(-1, dtype=torch.float32).isfinite()
        if finite_N.all():
            return [True] * len(works)
        return [bool(part.all()) for part in finite_N.split([work.num_tokens for work in works])]

    def scrub(self, blocks: list[int]) -> None:
        """Clean blocks that hold NaN before they are freed."""
        self.kv.scrub(blocks)
