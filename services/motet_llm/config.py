"""Settings of the LLM engine, checked once before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from motet_shared.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one `Engine`.

    model: folder of a checkpoint (config.json and safetensors).
    name: what clients call the model; empty: the folder's name.
    dtype: "auto" is the checkpoint's, but float32 where this CPU has no bfloat16 instructions.
    threads: cores that compute; 0 leaves torch's own choice.
    block_size: tokens per KV block.
    num_blocks: blocks in the pool; 0: as many as fit into `kv_memory` bytes.
    token_budget: tokens computed per step, decode and prefill together.
    max_running: most requests in one step.
    max_waiting: most requests in the queue; further ones are refused as overloaded.
    context: longest prompt plus output in tokens; 0: the model's own limit. The pool's capacity also bounds it.
    max_logprobs: most alternatives a request may ask for per token.
    """

    model: str
    name: str = ""
    dtype: str = "auto"
    threads: int = 0
    block_size: int = 16
    num_blocks: int = 0
    kv_memory: int = 256 << 20
    token_budget: int = 512
    max_running: int = 64
    max_waiting: int = 256
    context: int = 0
    max_logprobs: int = 20

    def __post_init__(self) -> None:
        if not (Path(self.model) / "config.json").is_file():
            raise ConfigError(f"model={self.model!r}: no config.json there; give the folder of a checkpoint")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}: choose one of {', '.join(DTYPES)}")
        for field in ("block_size", "kv_memory", "token_budget", "max_running", "max_waiting"):
            self._at_least(field, 1)
        for field in ("threads", "num_blocks", "context", "max_logprobs"):
            self._at_least(field, 0)
        if self.token_budget < self.max_running:
            raise ConfigError(
                f"token_budget={self.token_budget}: every running request needs a token per step; "
                f"give at least max_running={self.max_running}"
            )

    def _at_least(self, field: str, low: int) -> None:
        value = getattr(self, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"{field}={value!r}: give a whole number of at least {low}")

    @property
    def model_name(self) -> str:
        return self.name or Path(self.model).resolve().name
