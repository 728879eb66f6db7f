"""Run the model over the packed tokens of one step.

Shapes: N packed tokens, R rows that draw a token, V vocabulary, B rows, M blocks per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from motet_kernels import gpu
from motet_kernels.attention.paged_batch import PagedBatch
from motet_kernels.recurrent.packed_rows import PackedRows
from motet_kernels.runtime.device import (
    Download,
    describe,
    dtype_name,
    find_device,
    find_dtype,
    upload_all,
)
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.graphs import graphs_on
from motet_kernels.runtime.replay import can_replay
from motet_kernels.spans import upload
from motet_llm.adapters.bank import AdapterBank, Matrix, named_folders, slot_of
from motet_llm.attention import sequence_rope
from motet_llm.attention.heavy_hitters import Watch
from motet_llm.attention.long_context import LongRows, Staging
from motet_llm.attention.paged import GroupStep, Layout, ShapeProbe, StepLayout
from motet_llm.attention.picture_spans import PictureSpan
from motet_llm.attention.sink_window import Rows, rows_by_group
from motet_llm.cache.kv_cache import KvCache, layout_of
from motet_llm.cache.state_cache import StateCache
from motet_llm.config import EngineConfig
from motet_llm.models import stable_routers
from motet_llm.models.fuse import optimize
from motet_llm.scheduling.work import Work
from motet_llm.stages.code_predictor import CodePredictor
from motet_llm.stages.states import StepStates
from motet_llm.weights import checkpoint
from motet_llm.weights import quantized_checkpoint as quantized
from motet_llm.weights.packing import Packing
from motet_models.capacity import KvLayout, format_bytes
from motet_models.graph_sizes import StepShape, graph_sizes
from motet_shared.errors import ConfigError
from motet_shared.process.freed_memory import return_freed
from motet_shared.process.memory_turn import MemoryTurn
from motet_shared.process.starts import START

from .decode_graphs import DecodeGraphs, is_plain_decode
from .memory_budget import (
    MemoryBudget,
    draft_memory,
    expected_weight_bytes,
    graph_memory,
    step_bytes,
)
from .step_memory import PaddedStepMemory, StepMemory, StepStorage, can_pad, padded, stays


@dataclass(slots=True, frozen=True)
class _PackedStep:
    """Hold by group of layers where a step's tokens are stored, and what its rows attend to.

    slots: `[N]`. long: rows longer than the pool, which are not in `rows`; None without them.
    is_plain: every row attends to its blocks alone, and no query is watched.
    """

    slots: list[np.ndarray]
    rows: list[Rows]
    long: list[LongRows | None]
    is_plain: bool


@dataclass(slots=True, frozen=True)
class Forward:
    """Hold the logits `[R, V]` of the works that draw, in order.

    On a GPU, all tensors may still be being computed.
    hidden_ND: the last hidden states, which the next step may overwrite.
    draws_R: the positions among the N tokens that the logits belong to.
    """

    logits_RV: Tensor
    num_tokens: list[int]
    finite_N: Download
    hidden_ND: Tensor
    draws_R: Tensor

    @property
    def num_finite(self) -> list[int]:
        """Return for each work how many of its first tokens have finite last hidden states.

        Those tokens wrote no NaN or infinity to the cache.
        """
        finite_N = self.finite_N.wait()
        if finite_N.all():
            return self.num_tokens
        return [int(part.int().cumprod(0).sum()) for part in finite_N.split(self.num_tokens)]


class ModelRunner:
    """Hold the model and its caches, and turn a list of `Work` into logits."""

    def __init__(self, config: EngineConfig):
        folder = Path(config.model)
        if config.threads:
            torch.set_num_threads(config.threads)
        self.device = find_device(config.device, ConfigError)
        self.on_gpu = gpu.is_gpu(self.device)
        model_config = checkpoint.load_config(folder, config.stage)
        self.is_talker = config.stage == "talker"
        self.image_shape = None if self.is_talker else checkpoint.image_embedding_shape(folder)
        self.context = checkpoint.context_of(model_config, config.context)
        self.dtype = find_dtype(config.dtype, model_config.dtype, self.device, ConfigError)
        self.eos_ids = checkpoint.eos_ids(folder, model_config)
        self.vocab: int = model_config.vocab_size
        self._weights = checkpoint.resolve_weights(
            model_config, config.weights, self.dtype, self.device
        )
        self._budget = self._measure_memory(config, model_config)
        loaded = checkpoint.loaded_dtype(model_config, self._weights, self.dtype, self.device)
        START.mark("config")
        self._is_stable = config.deterministic and not self.on_gpu
        turn = MemoryTurn(config.memory_gate, config.wait_for_exit)
        self.packing = Packing(config, self._weights, loaded, self.device, turn)
        if not self.packing.is_reading:  # else that waits, and takes the memory
            turn.wait()
        matrices: dict[str, Matrix] = {}
        while not self._load(folder, model_config, loaded, matrices):
            matrices.clear()
        self.adapters = self._make_adapters(config, matrices)
        checkpoint.backbone(self.model).register_forward_hook(self._keep_hidden)
        self._hidden_1ND = torch.empty(0)
        self._backbone_output: Any = None  # of the last step
        # By the token counts of decode rows, or the padded number of tokens, and whether any row has an adapter.
        self._memories: dict[tuple[tuple[int, ...] | int, bool], StepMemory] = {}
        self._step_storage: StepStorage | None = None
        self._shapes = self._probe()
        START.mark("probe")
        self._check_pictures(config)
        if config.heavy_hitters is not None:
            config.heavy_hitters.check(self._shapes.layers, self._shapes.states)
        self._kv_dtype = checkpoint.resolve_kv_dtype(
            model_config, config.kv_dtype, self.dtype, self.device
        )
        num_snapshots = config.max_running if config.prefix_cache else 0
        self.states = self._make_states(config.max_running, num_snapshots)
        self._sink_window = config.sink_window
        layout = layout_of(
            self._shapes.layers, config.block_size, self._kv_dtype, self._sink_window
        )
        staging = self._staging_bytes(config.block_size) if config.long_context else 0
        num_blocks = config.num_blocks or self._blocks_in_memory(config, layout, staging)
        self.kv = self._make_kv(num_blocks, config.block_size)
        self._captures = config.cuda_graphs
        self._max_running, self._token_budget = config.max_running, config.token_budget
        self.graphs = self._make_graphs()
        self._staging = Staging(staging, self.device) if staging else None
        return_freed()
        self.packing.finish()

    def _load(
        self,
        folder: Path,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        matrices: dict[str, Matrix],
    ) -> bool:
        """Load and pack the model; return False if what was packed before is damaged.

        matrices: filled with those that adapters may change.
        """
        self.model = self._load_model(folder, config, dtype)
        START.mark("model")
        if not self.packing.settle(self.model):
            return False
        self.packing.note(self.model)
        self.rope = sequence_rope.install(self.model)
        self.fused = optimize(
            self.model,
            self._weights,
            self.dtype,
            self.device,
            matrices,
            packer=self.packing.packer,
            packs_experts=self._is_stable,
        )
        if self._is_stable:
            stable_routers.install(self.model)
        START.mark("packing")
        arrived = self.packing.arrive()
        START.mark("weights")
        return arrived

    def _measure_memory(
        self, config: EngineConfig, model_config: PreTrainedConfig
    ) -> MemoryBudget | None:
        """Return the memory budget, or None if the size of the KV cache is given.

        Raises ConfigError if the weights alone exceed it.
        """
        if config.num_blocks or config.kv_memory:
            return None
        folder, budget = Path(config.model), MemoryBudget.measure(config, self.device)
        is_quantized = quantized.is_quantized(folder, model_config)
        budget.check_weights(
            expected_weight_bytes(folder, self._weights, is_quantized, config.stage)
        )
        return budget

    def _load_model(
        self, folder: Path, config: PreTrainedConfig, dtype: torch.dtype
    ) -> PreTrainedModel:
        return checkpoint.load_model(folder, config, dtype, verified=self.packing.verified)

    def _make_adapters(
        self, config: EngineConfig, matrices: dict[str, Matrix]
    ) -> AdapterBank | None:
        """Return the adapter bank, or None where no adapters are served or may come.

        Factors have the activations' type on a GPU; on a CPU float32 with float32 weights, else
        bfloat16.
        """
        folders = named_folders(config.adapters, config.adapter_folder, config.model_name)
        if not folders and not config.adapter_folder:
            return None
        narrow = torch.float32 if self._weights == "float32" else torch.bfloat16
        return self._bank_class(
            folders,
            matrices,
            slots=config.max_adapters,
            max_rank=config.max_rank,
            dtype=self.dtype if self.on_gpu else narrow,
            device=self.device,
        )

    @property
    def _bank_class(self) -> Callable[..., AdapterBank]:
        """Return what makes an adapter bank, with the arguments of `AdapterBank`."""
        return AdapterBank

    def _keep_hidden(self, _module: Any, _args: Any, output: Any) -> None:
        self._hidden_1ND, self._backbone_output = output[0], output

    def _check_pictures(self, config: EngineConfig) -> None:
        """Raise ConfigError for options with which pictures would not see all of themselves."""
        if self.image_shape is None or not self.image_shape.looks_ahead:
            return
        for name in ("long_context", "attention_budget", "attention_window"):
            if getattr(config, name):
                raise ConfigError(
                    f"{name}: the tokens of this model's pictures see each other, which needs all"
                    f" keys in the pool; leave {name} off",
                    param=name,
                )

    @torch.inference_mode()
    def _probe(self) -> ShapeProbe:
        probe = ShapeProbe(self.device)
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        self._call({"input_ids": zero.unsqueeze(0)}, zero, probe, zero)
        return probe

    def _make_states(self, num_running: int, num_snapshots: int) -> StateCache | None:
        shapes = self._shapes.states
        return StateCache(shapes, num_running, num_snapshots, self.device) if shapes else None

    def _make_kv(self, num_blocks: int, block_size: int) -> KvCache:
        return KvCache(*self._kv_arguments(num_blocks, block_size))

    def _kv_arguments(self, num_blocks: int, block_size: int) -> tuple[Any, ...]:
        return (
            self._shapes.layers,
            num_blocks,
            block_size,
            self._kv_dtype,
            self.device,
            self._sink_window,
        )

    @property
    def _graph_obstacle(self) -> str:
        """Return which part of the model a graph cannot repeat on other sequences; empty: none."""
        if self.states is not None:
            return "recurrent layers"
        return "" if self.rope is None else "rotary frequencies that depend on a sequence's length"

    def _make_graphs(self) -> DecodeGraphs | None:
        """Return graphs over the present cache, none of them captured yet; None: steps are launched."""
        if not self._captures or self._graph_obstacle:
            return None
        try:
            graphs = graphs_on(self.device)
        except KernelError as error:
            raise ConfigError(
                f"cuda_graphs: {error}; or leave it off", param="cuda_graphs"
            ) from error
        sizes = graph_sizes(self._max_running, self.context, self.kv.block_size)
        axes = 1 if self.image_shape is None else self.image_shape.axes
        return DecodeGraphs(self._compute, self.kv, graphs, sizes, self.device, axes=axes)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture decode steps of all sizes, if they are replayed as graphs."""
        if self.graphs is not None:
            self.graphs.capture()

    def graph_stats(self) -> dict[str, float]:
        """Return counts of graphs and of replayed steps; empty without graphs."""
        return {} if self.graphs is None else self.graphs.stats()

    def resize(self, blocks_per_group: int) -> None:
        """Replace the cache by an empty one of `blocks_per_group` blocks per group of layers."""
        self.kv = self._make_kv(blocks_per_group * len(self.kv.groups), self.kv.block_size)
        self._memories, self.graphs = {}, self._make_graphs()

    @property
    def hands_over(self) -> bool:
        """Return True if keys and values are the whole state of a sequence, for any engine.

        Recurrent states are not transferred, and other engines do not know by which frequencies
        keys were rotated where those depend on lengths.
        """
        return self.states is None and self.rope is None

    def close(self) -> None:
        """Release what computes the model outside of this process: nothing."""

    def watch(self, on_failure: Callable[[BaseException], object]) -> None:
        """Have `on_failure` called, from any thread, if what is outside ends by itself."""

    def forget_recordings(self) -> None:
        """Forget the recordings of steps, after tensors that they read have moved."""
        self._memories = {}

    @contextmanager
    def other_caches(self, num_sequences: int, length: int) -> Iterator[None]:
        """Use empty caches for `num_sequences` sequences of `length` tokens within the context."""
        own = self.kv, self.states, self._memories, self.graphs
        num_blocks = num_sequences * len(self.kv.groups) * -(-length // self.kv.block_size)
        try:
            self.kv = self._make_kv(num_blocks, self.kv.block_size)
            self.states, self._memories = self._make_states(num_sequences, 0), {}
            self.graphs = self._make_graphs()
            yield
        finally:
            self.kv, self.states, self._memories, self.graphs = own

    @property
    def input_width(self) -> int:
        """Return the width of the states that a talker is given; 0 for another model."""
        return int(self.model.state_width) if self.is_talker else 0

    @property
    def predictor(self) -> CodePredictor | None:
        """Return what computes the further codes of a talker's frames, if these have several."""
        return self.model.predictor if self.is_talker else None

    @property
    def model_type(self) -> str:
        value: str = self.model.config.model_type
        return value

    @property
    def weights(self) -> str:
        """Return the format in which matrices are packed, unless the checkpoint packs them."""
        return self._weights

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the model's tensors; shared storage is counted once."""
        further = () if self.predictor is None else self.predictor.parameters()
        tensors = chain(self.model.parameters(), self.model.buffers(), further)
        return sum(
            {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
        )

    def describe(self) -> dict[str, str]:
        """Return the types, formats and device that were chosen when the model was loaded."""
        dtype, kv_dtype = dtype_name(self.dtype), dtype_name(self._kv_dtype)
        weights = ", ".join(filter(None, (quantized.formats(self.model), self._weights)))
        graphs = f"off: {self._graph_obstacle}" if self.graphs is None else self.graphs.describe()
        return {
            "dtype": dtype,
            "weights": weights,
            "kv_dtype": kv_dtype,
            **describe(self.device),
            **({"cuda_graphs": graphs} if self._captures else {}),
        }

    def _staging_bytes(self, block_size: int) -> int:
        """Return the bytes of one layer of the longest sequence, for the widest layer."""
        widest = max(shape.nbytes(self._kv_dtype) for shape in self._shapes.layers.values())
        return -(-self.context // block_size) * block_size * widest

    def _blocks_in_memory(self, config: EngineConfig, layout: KvLayout, staging: int) -> int:
        """Return as many blocks as the memory holds, and no more than the requests can use.

        The upper bound is `max_running` requests of full length. Raises ConfigError if not even one
        block fits.

        staging: bytes that are reserved for staging long sequences.
        """
        memory = config.kv_memory or self._memory_for_kv(config, layout)
        num_blocks = layout.blocks_in(memory - staging)
        if num_blocks < 1 and staging:
            raise ConfigError(
                f"kv_memory={memory}: long_context needs {staging} bytes of it for one layer of the longest sequence, "
                f"and then no block fits; give more, or a context of less than {self.context} tokens",
                param="kv_memory",
            )
        if num_blocks < 1 and self._budget is not None:
            raise self._budget.too_small_for_block(layout.block_bytes)
        if num_blocks < 1:
            raise ConfigError(
                f"kv_memory={memory}: does not hold one block; give more", param="kv_memory"
            )
        return min(
            num_blocks, config.max_running * layout.blocks_for(self.context, config.token_budget)
        )

    def _memory_for_kv(self, config: EngineConfig, layout: KvLayout) -> int:
        """Return the bytes that weights, adapters, states, drafts and a step leave of the budget."""
        assert self._budget is not None
        text = self.model.config.get_text_config()
        step = step_bytes(config, text.hidden_size, self.vocab, self.dtype.itemsize)
        if config.cuda_graphs and not self._graph_obstacle:
            elements = max(shape.elements for shape in self._shapes.layers.values())
            step += graph_memory(
                config,
                StepShape(
                    hidden=text.hidden_size,
                    widest=0,
                    vocab=self.vocab,
                    elements=elements,
                    groups=len(layout.groups),
                    element_bytes=self.dtype.itemsize,
                ),
                self.context,
            )
        draft = draft_memory(config, dtype_name(self._kv_dtype), len(layout.groups))
        bank = 0 if self.adapters is None else self.adapters.nbytes
        states = 0 if self.states is None else self.states.nbytes
        left = self._budget.left(
            weights=self.weight_bytes + bank + draft.weights, states=states, step=step
        )
        return left * layout.block_bytes // (layout.block_bytes + draft.per_block)

    def capacity(self) -> dict[str, str]:
        """Return for people what the model takes of the memory, and what fits into its KV cache."""
        kv = self.kv
        whole = kv.layout.blocks_for(self.context, 1)
        tokens = kv.layout.longest(kv.num_blocks, 1)
        fits = f"{kv.num_blocks // whole} sequences of {self.context} tokens"
        if whole > kv.num_blocks:
            fits = f"sequences of up to {tokens} tokens"
        budget = self._budget
        return {
            "weights": format_bytes(self.weight_bytes),
            "kv_cache": f"{format_bytes(kv.nbytes)}: {fits}",
            "packed": self.packing.source,
        } | ({} if budget is None else {"memory": budget.describe()})

    # ------------------------------------------------------------------------------------------------------ one step
    @torch.inference_mode()
    def forward(
        self,
        works: Sequence[Work],
        watched: Sequence[tuple[Watch, slice]] = (),
        given: StepStates | None = None,
    ) -> Forward:
        """Compute `works`, ordered as the scheduler gives them: those of a single token first.

        watched: watches that record queries, each with its slice of the packed tokens. given: the
        states that another model has computed of the tokens.
        """
        positions_N = np.concatenate([np.arange(*work.span) for work in works])
        ids_N = np.fromiter(
            (t for w in works for t in w.tokens),
            dtype=np.int64,
            count=len(positions_N),
        )
        ends = np.cumsum([work.num_tokens for work in works])
        draws = [
            np.arange(end - 1 - len(work.draft), end)
            for end, work in zip(ends, works, strict=True)
            if work.draws
        ]
        draws_R = np.concatenate(draws) if draws else np.empty(0, np.int64)
        if self.rope is not None:
            spans = [self.rope.rule.lengths(work.request, *work.span) for work in works]
            self.rope.lengths_N = np.concatenate(spans)
        positions = self._rotary_positions(positions_N, works)
        if given is not None and given.positions_3N is not None:
            positions = given.positions_3N
        step = self._packed(works, positions_N, watched)
        arrays = ids_N, positions, draws_R
        found = None if given is not None else self._replayed(works, arrays, step)
        if found is None:
            found = self._launched(works, arrays, step, ends, watched, given)
        logits_RV, draws_at = found
        hidden_ND = self._hidden_1ND[0]
        finite_N = hidden_ND.sum(-1, dtype=torch.float32).isfinite()
        return Forward(
            logits_RV, [work.num_tokens for work in works], Download(finite_N), hidden_ND, draws_at
        )

    def _replayed(
        self, works: Sequence[Work], arrays: Sequence[np.ndarray], step: _PackedStep
    ) -> tuple[Tensor, Tensor] | None:
        """Return the logits of a graph, and the places that draw; None if none holds the step.

        arrays: token ids, rotary positions, and places that draw.
        """
        if self.graphs is None or not step.is_plain or not is_plain_decode(works):
            return None
        ids_N, positions, _ = arrays
        found = self.graphs.run(ids_N, positions, step.slots, step.rows)
        if found is None:
            return None
        logits_RV, hidden_ND, draws_R = found
        self._hidden_1ND = hidden_ND.unsqueeze(0)
        self._backbone_output = BaseModelOutput(last_hidden_state=self._hidden_1ND)
        return logits_RV, draws_R

    def _launched(
        self,
        works: Sequence[Work],
        arrays: Sequence[np.ndarray],
        step: _PackedStep,
        ends: np.ndarray,
        watched: Sequence[tuple[Watch, slice]],
        given: StepStates | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of a step whose kernels are launched, and the places that draw."""
        ids, positions, draws_at = upload_all(arrays, self.device)
        layout = self._layout(works, step, ends, watched)
        layout.positions_N = positions if positions.ndim == 1 else None
        layout.spans = _picture_spans(works)
        with self._adapted(works, layout):
            inputs = self._inputs_of(ids, works) if given is None else self._summed(ids, given)
            return self._call(inputs, positions, layout, draws_at), draws_at

    def _compute(
        self, ids_N: Tensor, positions: Tensor, layout: StepLayout, draws_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return logits `[R, V]` and hidden states `[N, D]` of tokens that are all text."""
        logits_RV = self._call({"input_ids": ids_N.unsqueeze(0)}, positions, layout, draws_R)
        return logits_RV, self._hidden_1ND[0]

    @torch.inference_mode()
    def logits_of(self, rows: Sequence[int]) -> Tensor:
        """Return logits `[R, V]` of any tokens of the step that was computed last.

        rows: their positions among the step's tokens. The model's own head is applied to the hidden
        states that are kept, so that only these rows take memory.
        """
        backbone, kept = checkpoint.backbone(self.model), self._backbone_output
        rows_R = torch.tensor([*rows], device=self.device)
        tokens = self._hidden_1ND.shape[:2]  # some classes slice only if it matches the input
        with _replaced_forward(backbone, lambda *_args, **_named: kept):
            output = self.model(
                input_ids=torch.zeros(tokens, dtype=torch.long, device=self.device),
                use_cache=False,
                logits_to_keep=rows_R,
            )
        logits: Tensor = output.logits[0]
        return logits

    def _call(
        self, inputs: dict[str, Any], positions: Tensor, layout: Layout, draws_R: Tensor
    ) -> Tensor:
        """Call the model on N tokens.

        inputs: token ids or embeddings, by the model's argument names.
        positions: `[N]`, or `[3, N]` for rotary embeddings with several axes.
        """
        output = self.model(
            **inputs,
            position_ids=positions.unsqueeze(-2),
            use_cache=False,
            logits_to_keep=draws_R,
            layout=layout,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _inputs_of(self, ids_N: Tensor, works: Sequence[Work]) -> dict[str, Any]:
        """Return the model's inputs: token ids, or embeddings if there are image placeholders."""
        if self.image_shape is None:
            return {"input_ids": ids_N.unsqueeze(0)}
        image_works = [
            (start + places, shown)
            for start, work in zip(_starts(works), works, strict=True)
            if (images := work.request.images) is not None
            for places, shown in [images.between(*work.span)]
            if len(places)
        ]
        if not image_works:
            return {"input_ids": ids_N.unsqueeze(0)}
        (places_T,) = upload_all(
            [np.concatenate([places for places, _ in image_works])], self.device
        )
        shown_LTX = torch.cat([shown for _, shown in image_works], dim=1)
        embeddings_NX = self.model.get_input_embeddings()(ids_N)
        shown_LTX = upload(shown_LTX.to(embeddings_NX.dtype), self.device)
        inputs: dict[str, Any] = {
            "inputs_embeds": embeddings_NX.index_copy(0, places_T, shown_LTX[0]).unsqueeze(0)
        }
        if len(shown_LTX) > 1:
            mask_N = torch.zeros(len(ids_N), dtype=torch.bool, device=self.device).index_fill_(
                0, places_T, True
            )
            inputs |= {
                "visual_pos_masks": mask_N.unsqueeze(0),
                "deepstack_visual_embeds": list(shown_LTX[1:]),
            }
        return inputs

    def _summed(self, ids_N: Tensor, given: StepStates) -> dict[str, Any]:
        """Return the model's inputs, of tokens and the states that are given of them."""
        embeddings_NX = self.model.get_input_embeddings()(ids_N)
        return {"inputs_embeds": self.model.inputs_of(embeddings_NX, given).unsqueeze(0)}

    def _rotary_positions(self, positions_N: np.ndarray, works: Sequence[Work]) -> np.ndarray:
        """Return rotary positions: `[3, N]` if images with several axes are present, else `[N]`."""
        if (
            self.image_shape is None
            or self.image_shape.axes == 1
            or all(work.request.images is None for work in works)
        ):
            return positions_N
        turned_3N = np.tile(positions_N, (3, 1))
        for start, work in zip(_starts(works), works, strict=True):
            if work.request.images is not None:
                turned_3N[:, start : start + work.num_tokens] = work.request.images.positions(
                    *work.span
                )
        return turned_3N

    def _packed(
        self,
        works: Sequence[Work],
        positions_N: np.ndarray,
        watched: Sequence[tuple[Watch, slice]],
    ) -> _PackedStep:
        spans = [work.span for work in works]
        tables = [self._tables(works, g) for g in range(len(self.kv.groups))]
        dropped_B = np.array([work.request.blocks.num_dropped for work in works], dtype=np.int32)
        places_N = positions_N - np.repeat(dropped_B, [work.num_tokens for work in works])
        places = [positions_N if group.is_local else places_N for group in self.kv.groups]
        slots_N = list(map(partial(self._slots, works), tables, places))
        rows = rows_by_group(self.kv.groups, self.kv.block_size, tables, spans, dropped_B)
        long = self._long_rows(works, spans)
        rows = [
            row if group is None else row.only(group.others)
            for row, group in zip(rows, long, strict=True)
        ]
        is_plain = (
            not watched and not any(long) and all(len(row.lengths_B) == len(works) for row in rows)
        )
        return _PackedStep(slots_N, rows, long, is_plain)

    def _layout(
        self,
        works: Sequence[Work],
        step: _PackedStep,
        ends: np.ndarray,
        watched: Sequence[tuple[Watch, slice]],
    ) -> StepLayout:
        rows = step.rows
        state_slots_B = np.array([work.request.blocks.state_slot for work in works])
        *slots, state_slots = upload_all([*step.slots, state_slots_B], self.device)
        widest = max(row.tables_BM.shape[1] for row in rows)
        memory = self._memory(works, widest) if step.is_plain else None
        if memory is not None:
            memory.write(rows, slots)
            layout = StepLayout(
                self.kv, list(map(GroupStep, memory.slots, memory.batches)), memory=memory
            )
        else:
            batches = [PagedBatch(row.tables_BM, row.starts, row.lengths_B) for row in rows]
            if self.device.type != "cpu":
                batches = [batch.to(self.device) for batch in batches]
            layout = StepLayout(
                self.kv, list(map(GroupStep, slots, batches, step.long)), watched=list(watched)
            )
        if self.states is not None:
            layout.states, layout.state_rows = (
                self.states,
                PackedRows(state_slots, [0, *ends.tolist()]),
            )
        return layout

    def _long_rows(
        self, works: Sequence[Work], spans: list[tuple[int, int]]
    ) -> list[LongRows | None]:
        """Return by group of layers how rows longer than the pool attend; None without them."""
        spilled = [work.request.blocks.spilled for work in works]
        if self._staging is None or not any(spilled):
            return [None] * len(self.kv.groups)
        return [
            LongRows(
                self._staging,
                spilled,
                [work.request.tables[g] for work in works],
                spans,
                self.kv.block_size,
            )
            if group.full_attention
            else None
            for g, group in enumerate(self.kv.groups)
        ]

    @contextmanager
    def _adapted(self, works: Sequence[Work], layout: StepLayout) -> Iterator[None]:
        """Apply each row's adapter within the context."""
        if self.adapters is None or not _any_adapter(works):
            yield
            return
        slots_B = [slot_of(work.request.adapter) for work in works]
        segments = self.adapters.segments(np.repeat(slots_B, [work.num_tokens for work in works]))
        if layout.memory is not None:
            segments = layout.memory.keep_segments(segments)
        with self.adapters.using(segments):
            yield

    def _memory(self, works: Sequence[Work], num_blocks: int) -> StepMemory | None:
        """Return the memory in which to lay out a step, or None if the step is not to be replayed.

        num_blocks: the length of the step's block tables.
        """
        if self.on_gpu or not self.fused.get("layers") or not can_replay():
            return None
        counts = tuple(work.num_tokens for work in works)
        has_adapter = _any_adapter(works)
        is_exact = stays(counts) and all(map(_is_decode, works))
        if not is_exact and (has_adapter or not self._can_pad(works, counts)):
            return None
        size = padded(sum(counts))
        key = (counts if is_exact else size), has_adapter
        memory = self._memories.get(key)
        if memory is None or memory.max_blocks < num_blocks:
            storage = self._step_storage
            if storage is None or storage.max_blocks < num_blocks:
                longest = max(num_blocks, -(-self.context // self.kv.block_size))
                storage = StepStorage(len(self.kv.groups), longest, self._token_budget)
                self._step_storage = storage
            memory = self._memories[key] = (
                StepMemory(counts, storage)
                if is_exact
                else PaddedStepMemory(size, storage, self.kv.null_block)
            )
        return memory

    def _can_pad(self, works: Sequence[Work], counts: Sequence[int]) -> bool:
        """Return True for a step that may be padded: of text, all layers recorded."""
        return (
            self.states is None
            and self.fused.get("layers") == len(self._shapes.layers)
            and sum(counts) <= self._token_budget
            and can_pad(counts, self.context)
            and all(work.request.images is None or _is_decode(work) for work in works)
        )

    def _tables(self, works: Sequence[Work], group: int) -> np.ndarray:
        """Return block tables `[B, M]`, padded with the null block."""
        tables = [np.frombuffer(work.request.tables[group], dtype=np.int32) for work in works]
        tables_BM = np.full((len(works), max(map(len, tables))), self.kv.null_block, dtype=np.int32)
        for row, table in zip(tables_BM, tables, strict=True):
            row[: len(table)] = table
        return tables_BM

    def _slots(
        self, works: Sequence[Work], tables_BM: np.ndarray, places_N: np.ndarray
    ) -> np.ndarray:
        size = self.kv.block_size
        rows_N = np.repeat(np.arange(len(works)), [work.num_tokens for work in works])
        values: np.ndarray = (
            tables_BM[rows_N, places_N // size].astype(np.int64) * size + places_N % size
        )
        return values

    def scrub(self, blocks: list[int]) -> None:
        """Zero blocks that hold NaN before they are freed."""
        self.kv.scrub(blocks)


@contextmanager
def _replaced_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Have a module return what `forward` returns within the context."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


def _is_decode(work: Work) -> bool:
    return work.num_tokens == 1 + len(work.draft)


def _picture_spans(works: Sequence[Work]) -> list[PictureSpan]:
    """Return the pictures of a step whose tokens see each other in both directions."""
    spans = []
    for place, work in zip(_starts(works), works, strict=True):
        if work.request.images is None:
            continue
        begin, end = work.span
        for start, stop in work.request.images.wholes(begin, end):
            first = max(start, begin)
            rows = slice(place + first - begin, place + stop - begin)
            spans.append(PictureSpan(rows, first, start, stop, work.request.tables))
    return spans


def _any_adapter(works: Sequence[Work]) -> bool:
    return any(work.request.adapter is not None for work in works)


def _starts(works: Sequence[Work]) -> list[int]:
    """Return the index of each work's first token among those of the step."""
    return [0, *accumulate(work.num_tokens for work in works[:-1])]
