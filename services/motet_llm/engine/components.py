"""Build the parts of an engine, each with all it needs, in the order of their dependencies.

Blocks: tree → offload → pool → spill → tables → prefix cache. Then the scheduler, with the
admission policies of features, and then the features, which may use the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from motet_llm.attention.long_sequences import LongSequences
from motet_llm.attention.prompt_compression import PromptCompression, PromptWatches
from motet_llm.attention.rope_switch import RopeSwitch
from motet_llm.cache.block_pool import BlockPool
from motet_llm.cache.block_tables import BlockTables
from motet_llm.cache.offload import Offload
from motet_llm.cache.prefix_cache import PrefixCache, evict_to
from motet_llm.cache.prefix_tree import PrefixTree
from motet_llm.cache.spill import Spill
from motet_llm.config import EngineConfig
from motet_llm.disaggregation.handovers import Handovers, Placement
from motet_llm.disaggregation.kv_receiver import KvReceiver
from motet_llm.disaggregation.kv_sender import KvSender
from motet_llm.scheduling.budget import SchedulerLimits
from motet_llm.scheduling.scheduler import AdmissionPolicy, Scheduler
from motet_llm.scheduling.step_time import StepTimeEstimate
from motet_llm.speculation.speculator import Speculation
from motet_llm.stages.code_prediction import CodePrediction
from motet_llm.stages.state_feeding import StateFeeding
from motet_llm.stages.state_sending import StateSending
from motet_llm.stages.state_sources import state_source
from motet_models.model_config import read_config

from .feature import Feature
from .model_runner import ModelRunner
from .model_thread import ModelThread
from .prompt_scores import PromptScoring
from .thread_owner import ThreadOwner


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Hold the parts of one engine; None: the settings leave it out.

    features: those of its parts.
    """

    pool: BlockPool
    tables: BlockTables
    offload: Offload | None
    spill: Spill | None
    prefix_cache: PrefixCache | None
    scheduler: Scheduler
    receiver: KvReceiver
    sender: KvSender
    compression: PromptCompression | None
    speculation: Speculation | None
    scoring: PromptScoring
    sending: StateSending
    feeding: StateFeeding
    predicting: CodePrediction
    features: tuple[Feature, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """Hold the memory of an engine, and what allocates from it."""

    tree: PrefixTree
    pool: BlockPool
    tables: BlockTables
    offload: Offload | None
    spill: Spill | None
    prefix_cache: PrefixCache | None


def build(
    config: EngineConfig,
    runner: ModelRunner,
    model_thread: ModelThread,
    owner: ThreadOwner,
    placement: Placement | None,
    speculation: Speculation | None,
) -> Components:
    """Return the parts of an engine around `runner`. Raises ConfigError."""
    pace = StepTimeEstimate()
    blocks = _build_blocks(config, runner, pace, owner)
    handovers = Handovers(runner.kv, placement if runner.hands_over else None)
    watches = None if config.heavy_hitters is None else PromptWatches(config.heavy_hitters)
    predicting = CodePrediction(runner)
    feeding = StateFeeding(runner.input_width, runner.is_talker, predicting)
    policies: list[AdmissionPolicy] = [
        handovers,
        feeding,
        *([] if watches is None else [watches]),
    ]
    limits = SchedulerLimits(
        **{field.name: getattr(config, field.name) for field in fields(SchedulerLimits)}
    )
    scheduler = Scheduler(blocks.tables, limits, blocks.prefix_cache, pace, policies)
    receiver = KvReceiver(runner.kv, blocks.tables, scheduler, blocks.prefix_cache, handovers)
    sender = KvSender(runner.kv)
    compression = (
        None
        if watches is None
        else PromptCompression(runner.kv, blocks.tables, scheduler, watches, model_thread)
    )
    long_sequences = (
        None if blocks.spill is None else LongSequences(runner.kv, blocks.tables, blocks.spill)
    )
    rope = None if runner.rope is None else RopeSwitch(runner.rope.rule, scheduler)
    scoring = PromptScoring(runner)
    sending = StateSending(runner, state_source(runner, read_config(Path(config.model))))
    optional = (compression, speculation, long_sequences, rope)
    return Components(
        pool=blocks.pool,
        tables=blocks.tables,
        offload=blocks.offload,
        spill=blocks.spill,
        prefix_cache=blocks.prefix_cache,
        scheduler=scheduler,
        receiver=receiver,
        sender=sender,
        compression=compression,
        speculation=speculation,
        scoring=scoring,
        sending=sending,
        feeding=feeding,
        predicting=predicting,
        features=(
            receiver,
            sender,
            *(one for one in optional if one is not None),
            scoring,
            sending,
            feeding,
            predicting,
        ),
    )


def _build_blocks(
    config: EngineConfig, runner: ModelRunner, pace: StepTimeEstimate, owner: ThreadOwner
) -> _Blocks:
    kv = runner.kv
    tree = PrefixTree(len(kv.groups), kv.num_blocks)
    offload = _build_offload(config, pace, tree)
    pool = BlockPool(kv.num_blocks, config.block_size, evict_to(tree, kv, offload), owner)
    spill = Spill(kv, offload) if config.long_context and offload is not None else None
    tables = BlockTables(
        pool,
        kv.layout,
        step_tokens=config.token_budget,
        states=runner.states,
        max_open=config.max_running if runner.states else 1 << 30,
        keep_all=config.contiguous_kv,
        spill=spill,
    )
    prefix_cache = (
        PrefixCache(tree, pool, kv, offload, runner.states) if config.prefix_cache else None
    )
    return _Blocks(
        tree=tree, pool=pool, tables=tables, offload=offload, spill=spill, prefix_cache=prefix_cache
    )


def _build_offload(
    config: EngineConfig, pace: StepTimeEstimate, tree: PrefixTree
) -> Offload | None:
    if not (config.host_cache or config.disk_cache):
        return None
    folder = Path(config.cache_folder) if config.cache_folder else None
    return Offload(
        config.host_cache,
        config.disk_cache,
        folder,
        recompute_seconds=lambda: pace.prefill_token * config.block_size,
        on_drop=tree.drop_copy,
    )
