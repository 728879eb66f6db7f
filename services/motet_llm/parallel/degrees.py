"""Describe how many ranks compute a model, and refuse the settings that a group cannot follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

# Settings that a group of ranks does not follow yet, each with the value that leaves it off.
_SINGLE = {
    "cuda_graphs": (False, "sums between ranks are not part of a graph"),
    "long_context": (False, "blocks beyond the pool are kept by one process"),
    "host_cache": (0, "evicted blocks are kept by one process"),
    "disk_cache": (0, "evicted blocks are kept by one process"),
    "attention_budget": (0, "which tokens a prompt keeps is decided from all heads"),
    "stage": ("thinker", "states of another stage reach one process"),
}


class Settings(Protocol):
    """Define the settings that decide on a group."""

    @property
    def tensor_parallel(self) -> int: ...

    @property
    def pipeline_parallel(self) -> int: ...

    @property
    def expert_parallel(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Hold the degrees of a group: ranks that share each matrix, the layers, and the experts.

    Layers are divided among `pipeline` stages, one after the other. Within a stage, `tensor` ranks
    share the matrices and `expert` ranks the experts: the same ranks, if both are above 1.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @classmethod
    def of(cls, config: Settings) -> Degrees:
        """Return the degrees that the settings ask for."""
        return cls(
            tensor=config.tensor_parallel,
            pipeline=config.pipeline_parallel,
            expert=config.expert_parallel,
        )

    @property
    def width(self) -> int:
        """Return the ranks of a stage."""
        return max(self.tensor, self.expert)

    def settings(self) -> dict[str, int]:
        """Return the settings that ask for these degrees."""
        return {
            "tensor_parallel": self.tensor,
            "pipeline_parallel": self.pipeline,
            "expert_parallel": self.expert,
        }

    def smaller(self) -> Degrees:
        """Return the degrees of the largest group that has fewer ranks. One rank has none."""
        width = self.width
        # Experts can be divided by any number of ranks, matrices by heads: by a divisor.
        tensor = max((n for n in range(1, self.tensor) if not self.tensor % n), default=1)
        expert = self.expert - 1 if self.tensor == 1 else min(self.expert, tensor)
        candidates = []
        if self.pipeline > 1:
            candidates.append(replace(self, pipeline=self.pipeline - 1))
        if width > 1:
            candidates.append(replace(self, tensor=tensor, expert=expert))
        return max(candidates, key=lambda found: found.ranks)

    @property
    def ranks(self) -> int:
        return self.width * self.pipeline

    def stage(self, rank: int) -> int:
        """Return the stage of a rank; ranks of a stage follow each other."""
        return rank // self.width

    def place(self, rank: int) -> int:
        """Return the place of a rank within its stage."""
        return rank % self.width


def problems(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the settings that a group cannot follow, each with the reason and the remedy."""
    degrees = Degrees.of(config)
    if degrees.ranks == 1:
        return
    if min(degrees.tensor, degrees.expert) > 1 and degrees.tensor != degrees.expert:
        yield (
            "expert_parallel",
            f"the ranks that share matrices share the experts; give {degrees.tensor}, as"
            " tensor_parallel, or 1",
        )
    if config.device != "cpu":
        yield "device", "groups of ranks compute on CPUs; give cpu, or one rank"
    for name, (off, reason) in _SINGLE.items():
        if getattr(config, name) != off:
            yield name, f"{reason}; give {off} with more than one rank"
    if config.speculate not in ("off", "ngram"):
        yield "speculate", "draft models run in one process; give off or ngram with more ranks"
