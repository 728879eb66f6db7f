"""Declare the settings of the LLM engine and of the process that serves it, each exactly once.

`EngineSettings` has the settings that are flags of `python -m motet_llm`; `EngineConfig` adds those
of benchmarks and checks them all, before anything is loaded; `DecodeConfig` adds those of a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from motet_llm.attention.heavy_hitters import HeavyHitters
from motet_llm.parallel.cuts.fixed_tree import problems as tree_problems
from motet_llm.parallel.degrees import Degrees
from motet_llm.parallel.degrees import problems as group_problems
from motet_models.capacity import SinkWindow
from motet_models.omni import STAGES, Stage
from motet_shared.errors import ConfigError
from motet_shared.process.config import Bytes, Duration, ProcessConfig, setting

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8", "float8", "float8_e4m3fn")
CODE_INPUTS = ("int8", "int16")
WEIGHTS = ("auto", "float32", "bfloat16", "float16", "int8", "int4", "float8")
MOST_DRAFTED = 32


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Hold settings of an engine that operators choose; the help texts are their documentation."""

    model: str = setting("folder of the checkpoint: config.json and safetensors, or GGUF")
    name: str = setting("what clients call the model (default: the folder's name)", default="")
    stage: Stage = setting("stage of an omni model that is served", default="thinker")
    target: str = setting("name of this target in the chain of its model", default="")
    rank: int = setting("place of the target in that chain, from 0", default=0, min=0)
    device: str = setting(
        "where the model computes: cpu, cuda (the first GPU), cuda:1, …", default="cpu"
    )
    dtype: str = setting(
        "type of activations: auto (float32; on a GPU the checkpoint's), float32, bfloat16 or float16 "
        "(on GPUs)",
        default="auto",
    )
    weights: str = setting(
        "format of matrices: auto (the checkpoint's; on a GPU that of activations), float32, "
        "bfloat16, float16 (on GPUs), int8 (per channel; activations per token), int4 (groups of 32) "
        "or float8 (e4m3, per channel)",
        default="auto",
    )
    kv_dtype: str = setting(
        "type of the KV cache: auto (bfloat16 if the checkpoint is, else float32; on a GPU that of "
        "activations), float32, bfloat16, float16, int8 or float8 (a scale per token and head)",
        default="auto",
    )
    code_inputs: str = setting(
        "what matrices in a checkpoint's codes take in on a CPU: int8 (a scale per 32 numbers) "
        "or int16 (nearly exact, slower with many sequences)",
        default="int8",
    )
    threads: int = setting("cores that compute; 0: torch's choice", default=0, min=0)
    tensor_parallel: int = setting(
        "processes (ranks) that share each matrix and the heads of attention", default=1, min=1
    )
    pipeline_parallel: int = setting(
        "stages, one after the other, that share the layers", default=1, min=1
    )
    expert_parallel: int = setting(
        "ranks that share the experts; 1, or as many as tensor_parallel, if that is above 1",
        default=1,
        min=1,
    )
    collective_timeout: float = setting(
        "seconds after which ranks that wait for each other give up, and the worker ends",
        default=30.0,
        min=0.1,
    )
    rank_memory: bool = setting(
        "ranks exchange their sums in memory that they share; false: over loopback connections",
        default=True,
    )
    deterministic: bool = setting(
        "a request's tokens do not depend on the rest of the batch, nor on the number of ranks",
        default=False,
    )
    overlap: bool = setting(
        "compute on a thread of its own, and handle a step's tokens while the next is computed",
        default=True,
    )
    cuda_graphs: bool = setting(
        "replay decode steps on a GPU as CUDA graphs, captured at the start", default=False
    )
    block_size: int = setting("tokens per KV block", default=16, min=1)
    num_blocks: int = setting("KV blocks; 0: as many as fit into kv_memory", default=0, min=0)
    kv_memory: Bytes = setting(
        "memory of the KV cache; 0: what weights and states leave of memory", default=0, min=0
    )
    memory: Bytes = setting(
        "memory of weights, states, KV cache and a step together; 0: memory_share of what is free",
        default=0,
        min=0,
    )
    memory_share: float = setting(
        "share of the free memory of the device, before the model is loaded, that it may use",
        default=0.85,
        min=0,
    )
    prefix_cache: bool = setting("share the blocks of prompts that begin alike", default=True)
    host_cache: Bytes = setting(
        "host memory for blocks evicted from the KV cache; 0: none", default=0, min=0
    )
    disk_cache: Bytes = setting(
        "disk space for blocks evicted from host_cache; 0: none", default=0, min=0
    )
    long_context: bool = setting(
        "sequences may be longer than the KV cache: host_cache and disk_cache hold their first blocks, "
        "and kv_memory also holds one layer of context tokens",
        default=False,
    )
    packed_cache: Bytes = setting(
        "disk space for the packed weights of all models, so that each is packed once; 0: none",
        default=32 << 30,
        min=0,
    )
    cache_folder: str = setting(
        "folder of disk_cache (default: the place for temporary files)", default=""
    )
    token_budget: int = setting(
        "tokens computed per step, decode and prefill together", default=512, min=1
    )
    decode_slowdown: float = setting(
        "prefill may stretch the steps of running streams to this multiple; 0: no limit",
        default=1.8,
        min=0,
    )
    latency_goal: float | None = setting(
        "seconds between tokens up to which prefill may stretch steps beyond decode_slowdown (default: "
        "0.1, divided by the running streams, at least 0.02)",
        default=None,
        min=0,
    )
    max_running: int = setting("most requests in one step", default=64, min=1)
    max_waiting: int = setting(
        "most requests in the queue; further ones are refused", default=256, min=1
    )
    speculate: str = setting(
        "source of draft tokens: off, ngram (the request's own tokens), or the folder of a draft "
        "model, of Medusa heads or of an EAGLE layer",
        default="off",
    )
    draft_tokens: int = setting("most draft tokens at a time", default=5, min=1, max=MOST_DRAFTED)
    adapters: tuple[str, ...] = setting("LoRA adapters as PEFT saves them, name=folder", default=())
    adapter_folder: str = setting(
        "folder whose subfolders are adapters too, by their own names", default=""
    )
    max_adapters: int = setting("adapters in memory at a time", default=16, min=1)
    max_rank: int = setting("highest rank of an adapter", default=64, min=1)
    attention_window: int = setting(
        "last tokens that layers with full attention see, in whole blocks; 0: all",
        default=0,
        min=0,
    )
    attention_sinks: int = setting(
        "first tokens that they see besides, in whole blocks", default=16, min=0
    )
    attention_budget: int = setting(
        "tokens that they keep of a longer prompt: its last ones, and those that these attend to the "
        "most; 0: all",
        default=0,
        min=0,
    )
    attention_observe: int = setting(
        "last tokens of a prompt whose attention decides which are kept", default=32, min=1
    )
    context: int = setting(
        "longest prompt plus output, tokens; 0: the model's own limit", default=0, min=0
    )

    @property
    def model_name(self) -> str:
        """Return the name that clients use for the model."""
        return self.name or Path(self.model).resolve().name


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineSettings):
    """Hold the checked settings of one `Engine`.

    Raises ConfigError, which names the field. static_batching, contiguous_kv and always_speculate
    are for comparisons in benchmarks.
    """

    max_logprobs: int = setting("most alternatives that a request may ask for", default=20, min=0)
    wait_for_exit: tuple[str, ...] = setting(
        "processes that end before the model takes memory, as PID:START", default=()
    )
    memory_gate: Path | None = setting(
        "FIFO from which a line is read before the model takes memory", default=None
    )
    static_batching: bool = setting(
        "a batch starts only when the one before has ended", default=False
    )
    contiguous_kv: bool = setting(
        "a request holds the blocks of its longest possible reply from the start", default=False
    )
    always_speculate: bool = setting("draft tokens whether that pays or not", default=False)

    @property
    def sink_window(self) -> SinkWindow | None:
        """Return sinks and window of layers with full attention; None if they see all tokens."""
        return (
            SinkWindow(self.attention_sinks, self.attention_window)
            if self.attention_window
            else None
        )

    @property
    def heavy_hitters(self) -> HeavyHitters | None:
        """Return what layers with full attention keep of a prompt; None if they keep all."""
        return (
            HeavyHitters(self.attention_budget, self.attention_observe)
            if self.attention_budget
            else None
        )

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check_bounds(field)
        for problem in (
            *self._model_problems(),
            *self._schedule_problems(),
            *self._window_problems(),
            *self._budget_problems(),
            *self._offload_problems(),
            *(self._problem(name, remedy) for name, remedy in self._rank_problems()),
        ):
            raise problem

    def _rank_problems(self) -> Iterator[tuple[str, str]]:
        yield from group_problems(self)
        if self.deterministic and Degrees.of(self).ranks > 1:
            yield from tree_problems(self)

    def _check_bounds(self, field: Field[Any]) -> None:
        low, high, value = field.metadata["min"], field.metadata["max"], getattr(self, field.name)
        if low is None or (value is None and field.default is None):
            return
        is_whole = isinstance(field.default, int)
        if is_whole and (not isinstance(value, int) or isinstance(value, bool)):
            raise self._problem(field.name, f"give a whole number of at least {low}")
        if not value >= low:  # NaN is refused too
            kind = "a whole number" if is_whole else "a number"
            raise self._problem(field.name, f"give {kind} of at least {low}")
        if high is not None and value > high:
            raise self._problem(field.name, f"give at most {high}")

    def _problem(self, name: str, remedy: str) -> ConfigError:
        """Return the error for a setting, with its value and the remedy."""
        return ConfigError(f"{name}={getattr(self, name)!r}: {remedy}", param=name)

    def _model_problems(self) -> Iterator[ConfigError]:
        if not (Path(self.model) / "config.json").is_file():
            yield self._problem("model", "no config.json there; give the folder of a checkpoint")
        for name, choices in (
            ("dtype", DTYPES),
            ("weights", WEIGHTS),
            ("code_inputs", CODE_INPUTS),
            ("kv_dtype", KV_DTYPES),
            ("stage", STAGES),
        ):
            if getattr(self, name) not in choices:
                yield self._problem(name, f"choose one of {', '.join(choices)}")
        if not 0 < self.memory_share <= 1:
            yield self._problem(
                "memory_share", "give a share of the free memory, above 0 and up to 1"
            )
        if (
            self.speculate not in ("off", "ngram")
            and not (Path(self.speculate) / "config.json").is_file()
        ):
            yield self._problem(
                "speculate",
                "no config.json there; give off, ngram, or the folder of a draft model or of heads",
            )

    def _schedule_problems(self) -> Iterator[ConfigError]:
        if self.token_budget < self.max_running:
            yield self._problem(
                "token_budget",
                "every running request needs a token per step; "
                f"give at least max_running={self.max_running}",
            )
        if self.decode_slowdown != 0 and not self.decode_slowdown > 1:
            yield self._problem("decode_slowdown", "give more than 1, or 0 for no limit")

    def _window_problems(self) -> Iterator[ConfigError]:
        size = self.block_size
        for name in ("attention_window", "attention_sinks") if self.attention_window else ():
            if (value := getattr(self, name)) % size:
                yield self._problem(
                    name,
                    f"layers see whole blocks; give a multiple of block_size={size}, "
                    f"such as {value // size * size or size}",
                )

    def _budget_problems(self) -> Iterator[ConfigError]:
        if not self.attention_budget:
            return
        if self.attention_budget <= self.attention_observe:
            yield self._problem(
                "attention_budget",
                f"the last {self.attention_observe} tokens of a prompt (attention_observe) are part of "
                "it; give more than them",
            )
        if self.attention_window:
            yield self._problem(
                "attention_budget",
                f"attention_window={self.attention_window} is set too; set one of them to 0",
            )
        if self.contiguous_kv:
            yield self._problem(
                "attention_budget", "contiguous_kv keeps the memory of whole prompts; turn it off"
            )

    def _offload_problems(self) -> Iterator[ConfigError]:
        has_tiers = bool(self.host_cache or self.disk_cache)
        if self.long_context and not has_tiers:
            yield self._problem(
                "long_context",
                "blocks beyond the pool need host_cache or disk_cache; give one of them a size",
            )
        for name, reason in (
            ("attention_window", "makes no sequence longer than the pool"),
            ("attention_budget", "compresses prompts that are whole in the pool"),
            ("contiguous_kv", "reserves whole sequences in the pool"),
        ):
            if self.long_context and getattr(self, name):
                yield self._problem("long_context", f"{name} {reason}; leave one of them off")
        if has_tiers and not (self.prefix_cache or self.long_context):
            name = "host_cache" if self.host_cache else "disk_cache"
            yield self._problem(
                name, "it holds blocks of the prefix cache; set prefix_cache=true or the size to 0"
            )
        if self.cache_folder and not Path(self.cache_folder).is_dir():
            yield self._problem("cache_folder", "no such folder; create it")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(EngineSettings, ProcessConfig):
    """Generate text with one model, as a decode or a prefill worker."""

    image_memory: Bytes = setting(
        "memory for embeddings of images that requests hold", default=1 << 30, min=1 << 20
    )
    states_memory: Bytes = setting(
        "memory of a thinker for states that the next stage has not read yet",
        default=64 << 20,
        min=1 << 20,
    )
    step_timeout: float = setting(
        "seconds after which a step counts as hanging and the process ends", default=120.0, min=1
    )
    grammar_timeout: float = setting(
        "seconds that a request's grammar may take to compile", default=10.0, min=0.1
    )
    grammar_cache: int = setting("compiled grammars that are kept", default=128, min=1)
    role: Literal["decode", "prefill"] = setting(
        "role of the worker: prefill computes prompts for decode", default="decode"
    )
    remote_prefill: Literal["auto", "always", "never"] = setting(
        "whether prefill workers compute prompts; auto: where that is expected to be quicker",
        default="auto",
    )
    prefill_patience: Duration = setting(
        "seconds without progress after which a prefill worker is given up", default=5.0, min=0.1
    )
    transfer_memory: Bytes = setting(
        "memory of a prefill worker for keys and values that are being transferred",
        default=128 << 20,
        min=1 << 20,
    )

    def engine(self) -> EngineConfig:
        """Return the engine's settings, checked. Raises ConfigError."""
        given: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(EngineSettings)}
        if self.role == "prefill":
            given |= {"speculate": "off", "cuda_graphs": False}  # prefill workers draw no tokens
        return EngineConfig(**given, wait_for_exit=self.wait_for_exit, memory_gate=self.memory_gate)
