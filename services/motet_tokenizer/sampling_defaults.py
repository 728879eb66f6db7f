"""Complete a request's sampling by what the model's generation_config.json recommends.

The fields are those that transformers and vLLM read there; `do_sample` is not among them, because
clients choose greedy decoding by `temperature`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from motet_shared.errors import ConfigError
from motet_shared.messages import Sampling

# Fields of `Sampling` with their ranges, which are those of the engine.
_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Recommended values by field of `Sampling`, and the most tokens of a reply; None: no limit."""

    values: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None

    @classmethod
    def of(cls, generation: Mapping[str, Any]) -> SamplingDefaults:
        """Return the defaults of the contents of a generation_config.json.

        Raises ConfigError that names a field whose value cannot be used.
        """
        values: dict[str, float] = {}
        for name, (low, high) in _RANGES.items():
            if (value := generation.get(name)) is not None:
                if not _is_number(value) or not low <= value <= high:
                    raise _problem(name, value, f"{low:g} to {high:g}")
                values[name] = float(value)
        if (top_k := generation.get("top_k")) is not None:
            if not isinstance(top_k, int) or isinstance(top_k, bool):
                raise _problem("top_k", top_k, "a whole number")
            values["top_k"] = max(top_k, 0)  # -1 and 0: off
        if values.get("top_p") == 0.0:  # only the most probable token remains
            values |= {"top_p": 1.0, "top_k": 1}
        most = generation.get("max_new_tokens")
        if most is not None and (not isinstance(most, int) or most < 1):
            raise _problem("max_new_tokens", most, "at least 1")
        return cls(values, most)

    def complete(self, sampling: Sampling) -> Sampling:
        """Return `sampling` with the recommended values of the fields that the client left out."""
        if not sampling.left_out:
            return sampling
        found = {name: self.values[name] for name in sampling.left_out if name in self.values}
        return replace(sampling, left_out=[], **found)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _problem(name: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(
        f"generation_config.json: {name}={value!r}: give {allowed}, or start with generation_config=none",
        param="generation_config",
    )
