"""Read vLLM's load from the statistics that it gives after each step."""

from __future__ import annotations

from typing import Any


class LoadReader:
    """Be a logger of vLLM's statistics: keep the newest of each of its engines."""

    def __init__(self) -> None:
        self._newest: dict[int, Any] = {}

    def factory(self, vllm_config: Any, engine_index: int = 0) -> LoadReader:
        """Return this object: vLLM calls a factory for the logger of each engine."""
        return self

    def record(
        self,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **_: Any,
    ) -> None:
        if scheduler_stats is not None:
            self._newest[engine_idx] = scheduler_stats

    def load(self) -> dict[str, float]:
        """Return requests that run and wait, and the free share of the KV cache (0 to 1)."""
        newest = list(self._newest.values())
        if not newest:
            return {}
        used = sum(float(stats.kv_cache_usage) for stats in newest) / len(newest)
        return {
            "running": float(sum(stats.num_running_reqs for stats in newest)),
            "queued": float(sum(stats.num_waiting_reqs for stats in newest)),
            "kv_free": min(1.0, max(0.0, 1.0 - used)),
        }

    def log_engine_initialized(self) -> None:
        """Do nothing; part of vLLM's interface, as all that follow."""

    def log(self) -> None: ...

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None: ...

    def record_admission_rejection(self, *_: Any) -> None: ...
