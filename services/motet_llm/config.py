"""Define the settings of the LLM engine, checked once before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from motet_llm.attention.heavy_hitters import HeavyHitters
from motet_models.capacity import Recent
from motet_shared.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8", "float8", "float8_e4m3fn")
WEIGHTS = ("auto", "float32", "bfloat16", "float16", "int8", "int4", "float8")
MOST_DRAFTED = 32


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one `Engine`.

    model: folder of a checkpoint (config.json and safetensors).
    name: what clients call the model; empty: the folder's name.
    device: where the model computes: "cpu", "cuda" (the first GPU), "cuda:1".
    dtype: type of activations; "auto" is float32, on a GPU the checkpoint's. "float16" is for GPUs.
    weights: format of the matrices: "auto" is the checkpoint's (float16 becomes float32), on a GPU
        that of the activations; "int8" rounds weights per output channel and activations per token,
        "int4" rounds weights in groups of 32, "float8" (e4m3) rounds only weights, per output
        channel. "float16" is for GPUs.
    kv_dtype: type of the KV cache; "auto" is bfloat16 if the checkpoint is, else float32; on a GPU
        that of the activations. "int8" and "float8" (e4m3; torch's name "float8_e4m3fn" works too)
        have a scale per token and head.
    threads: cores that compute; 0 leaves torch's own choice.
    deterministic: a request's tokens do not depend on what else is in the batch.
    overlap: the model computes on a thread of its own, and a step's tokens are handled while the
        next step is computed.
    block_size: tokens per KV block.
    num_blocks: blocks in the pool; 0: as many as fit into `kv_memory`.
    kv_memory: bytes of the pool; 0: 256 MiB, on a GPU `gpu_share` of what is free once the weights
        are loaded.
    gpu_share: share of a GPU's free memory that the pool takes, above 0 and up to 1.
    prefix_cache: requests share the blocks of prompts with the same beginning.
    host_cache, disk_cache: bytes of the offload tiers for blocks evicted from the pool; 0: none.
    long_context: sequences may be longer than the pool: their first blocks lie in the offload
        tiers, and a step copies them one layer at a time into a memory for one layer of `context`
        tokens, which counts towards `kv_memory`.
    cache_folder: where the disk tier makes its folder; empty: the system's folder for temporary
        files.
    latency_goal: seconds between two tokens of a stream that are good enough: up to there, prefill
        may stretch a step beyond `decode_slowdown`.
    token_budget: tokens computed per step, decode and prefill together.
    decode_slowdown: prefill may stretch a step of running streams to this multiple of a step
        without it; 0: no limit.
    max_running: most requests in one step.
    max_waiting: most requests in the queue; further ones are refused as overloaded.
    speculate: how draft tokens are guessed: "off", "ngram" (from the request's own tokens), or the
        folder of a smaller model of the same vocabulary, of Medusa heads, or of an EAGLE layer.
    draft_tokens: most tokens that are guessed at a time.
    adapters: LoRA adapters as PEFT saves them, "name=folder" each; requests choose one by its name.
    adapter_folder: folder whose subfolders are adapters too, by their own names; empty: none.
    max_adapters: most adapters in memory at a time.
    max_rank: highest rank that an adapter may have.
    attention_window, attention_sinks: layers with full attention see only this many tokens at the
        end and at the beginning of the sequence, in whole blocks; a window of 0: all tokens.
    attention_budget, attention_observe: of a longer prompt, the same layers keep `attention_budget`
        tokens once it is computed: its last `attention_observe` tokens and those to which these
        attend the most; 0: all.
    context: longest prompt plus output in tokens; 0: the model's own limit. The pool's capacity
        also bounds it.
    max_logprobs: most alternatives that a request may ask for per token.
    static_batching, contiguous_kv: for comparisons in benchmarks. A batch starts only when the one
        before has ended; a request holds the blocks of its longest possible reply from the start.
    always_speculate: for comparisons too. Drafts are made whether they pay or not.
    """

    model: str
    name: str = ""
    device: str = "cpu"
    dtype: str = "auto"
    weights: str = "auto"
    kv_dtype: str = "auto"
    threads: int = 0
    deterministic: bool = False
    overlap: bool = True
    block_size: int = 16
    num_blocks: int = 0
    kv_memory: int = 0
    gpu_share: float = 0.85
    prefix_cache: bool = True
    host_cache: int = 0
    disk_cache: int = 0
    long_context: bool = False
    cache_folder: str = ""
    token_budget: int = 512
    decode_slowdown: float = 1.8
    latency_goal: float = 0.0
    max_running: int = 64
    max_waiting: int = 256
    speculate: str = "off"
    draft_tokens: int = 5
    adapters: tuple[str, ...] = ()
    adapter_folder: str = ""
    max_adapters: int = 16
    max_rank: int = 64
    attention_window: int = 0
    attention_sinks: int = 16
    attention_budget: int = 0
    attention_observe: int = 32
    context: int = 0
    max_logprobs: int = 20
    static_batching: bool = False
    contiguous_kv: bool = False
    always_speculate: bool = False

    @property
    def recent(self) -> Recent | None:
        """Return sinks and window of layers with full attention; None if they see all tokens."""
        return (
            Recent(self.attention_sinks, self.attention_window) if self.attention_window else None
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
        if not (Path(self.model) / "config.json").is_file():
            raise ConfigError(
                f"model={self.model!r}: no config.json there; give the folder of a checkpoint"
            )
        for field, choices in (("dtype", DTYPES), ("weights", WEIGHTS), ("kv_dtype", KV_DTYPES)):
            if (value := getattr(self, field)) not in choices:
                raise ConfigError(f"{field}={value!r}: choose one of {', '.join(choices)}")
        for field in ("block_size", "token_budget", "max_running", "max_waiting", "draft_tokens"):
            self._at_least(field, 1)
        for field in ("max_adapters", "max_rank"):
            self._at_least(field, 1)
        for field in (
            "threads",
            "num_blocks",
            "kv_memory",
            "context",
            "max_logprobs",
            "host_cache",
            "disk_cache",
        ):
            self._at_least(field, 0)
        if self.token_budget < self.max_running:
            raise ConfigError(
                f"token_budget={self.token_budget}: every running request needs a token per step; "
                f"give at least max_running={self.max_running}"
            )
        if self.draft_tokens > MOST_DRAFTED:
            raise ConfigError(f"draft_tokens={self.draft_tokens}: give at most {MOST_DRAFTED}")
        if (
            self.speculate not in ("off", "ngram")
            and not (Path(self.speculate) / "config.json").is_file()
        ):
            raise ConfigError(
                f"speculate={self.speculate!r}: no config.json there; give off, ngram, or the folder of a draft model "
                "or of heads"
            )
        for field in ("attention_window", "attention_sinks") if self.attention_window else ():
            if (value := getattr(self, field)) < 0 or value % self.block_size:
                below = max(0, value) // self.block_size * self.block_size
                raise ConfigError(
                    f"{field}={value}: whole blocks are seen or not; give a multiple of block_size={self.block_size}, "
                    f"say {below or self.block_size}"
                )
        if self.attention_budget:
            self._check_budget()
        if not 0 < self.gpu_share <= 1:
            raise ConfigError(
                f"gpu_share={self.gpu_share}: give a share of the free memory, above 0 and up to 1"
            )
        if self.decode_slowdown != 0 and not self.decode_slowdown > 1:
            raise ConfigError(
                f"decode_slowdown={self.decode_slowdown}: give more than 1, or 0 for no limit"
            )
        if not self.latency_goal >= 0:
            raise ConfigError(f"latency_goal={self.latency_goal}: give seconds, or 0 for none")
        if self.long_context:
            self._check_long_context()
        if (self.host_cache or self.disk_cache) and not (self.prefix_cache or self.long_context):
            raise ConfigError(
                "host_cache, disk_cache: they hold what falls out of the prefix cache; turn it on"
            )
        if self.cache_folder and not Path(self.cache_folder).is_dir():
            raise ConfigError(f"cache_folder={self.cache_folder!r}: no such folder; create it")

    def _check_budget(self) -> None:
        told = f"attention_budget={self.attention_budget}"
        self._at_least("attention_budget", 0)
        self._at_least("attention_observe", 1)
        if self.attention_budget <= self.attention_observe:
            raise ConfigError(
                f"{told}: the last {self.attention_observe} tokens of a prompt (attention_observe) are part of it; "
                "give more than them"
            )
        if self.attention_window:
            raise ConfigError(
                f"{told}, attention_window={self.attention_window}: give one of them, 0 for the other"
            )
        if self.contiguous_kv:
            raise ConfigError(
                f"{told}: contiguous_kv keeps the memory of whole prompts; turn it off"
            )

    def _check_long_context(self) -> None:
        told = "long_context=true"
        if not (self.host_cache or self.disk_cache):
            raise ConfigError(
                f"{told}: what the pool does not hold goes to host_cache or disk_cache; give one of them"
            )
        if self.attention_window:
            raise ConfigError(
                f"{told}: with attention_window no sequence needs more than the pool; leave one of them off"
            )
        if self.attention_budget:
            raise ConfigError(
                f"{told}: attention_budget cuts prompts down that are whole in the pool; leave one of them off"
            )
        if self.contiguous_kv:
            raise ConfigError(
                f"{told}: contiguous_kv reserves whole sequences in the pool; leave one of them off"
            )

    def _at_least(self, field: str, low: int) -> None:
        value = getattr(self, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"{field}={value!r}: give a whole number of at least {low}")

    @property
    def model_name(self) -> str:
        return self.name or Path(self.model).resolve().name
