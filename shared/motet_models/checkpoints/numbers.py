"""Find impossible numbers in a checkpoint's JSON files: NaN, an epsilon of -1, a billion layers.

Fields are recognized by patterns of their names, which families of transformers and diffusers
share, so a new family needs no entry here. Fields that match no pattern only have to be finite.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet_shared.errors import ConfigError

FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "scheduler_config.json",
    "adapter_config.json",
)
# Limits that published files write as infinite: Mamba's step sizes, the clipping of DPM-Solver.
UNBOUNDED = {"time_step_limit", "lambda_min_clipped"}
ROPE = {"rope_scaling", "rope_parameters"}
_DEEPEST = 32  # maximum levels of nesting
_MOST_LAYERS = 10_000
_MOST = 2**31 - 1


@dataclass(frozen=True)
class _Range:
    """Describe the allowed values of a field.

    above: the least value is excluded.
    whole: integers only.
    """

    least: float
    most: float = math.inf
    above: bool = False
    whole: bool = False

    def allows(self, value: float) -> bool:
        if not self.least <= value <= self.most or (self.above and value == self.least):
            return False
        return not self.whole or value == int(value)

    def __str__(self) -> str:
        low = f"more than {self.least:g}" if self.above else f"at least {self.least:g}"
        high = "" if self.most == math.inf else f" and at most {self.most:.10g}"
        return f"{'an integer of ' if self.whole else ''}{low}{high}"


_POSITIVE = _Range(0, above=True)
_COUNT = _Range(1, _MOST, whole=True)
# The first pattern that matches a field's whole name applies.
_RULES: tuple[tuple[re.Pattern[str], _Range], ...] = tuple(
    (re.compile(pattern), allowed)
    for pattern, allowed in (
        (r".*_(eps|epsilon)", _Range(0, 1, above=True)),
        (r"eps|epsilon", _Range(0, 1)),  # also matches label smoothing
        (r"(.*_)?(theta|theta_base|rope_base|rotary_emb_base|base_freq|freq_base)", _POSITIVE),
        (r"partial_rotary_factor|rotary_pct|rotary_percent", _Range(0, 1)),
        (r".*softcap(ping)?(_value)?", _Range(0)),  # 0: none
        (
            r"query_pre_attn_scalar|logits_scaling|scaling_factor|rescale_factor|image_std|repetition_penalty",
            _POSITIVE,
        ),
        (r"temperature|length_penalty", _Range(0)),
        (r"top_p|min_p|typical_p", _Range(0, 1)),
        (r"(num_hidden|num|n)_layers?", _Range(1, _MOST_LAYERS, whole=True)),
        (r"(num_)?(encoder|decoder)_layers", _Range(0, _MOST_LAYERS, whole=True)),
        (r"head_dim", _Range(0, _MOST, whole=True)),  # 0: derived from the hidden size
        (r"((encoder|decoder)_)?((num|n)_)?(attention_|attn_|key_value_|kv_)?heads?", _COUNT),
        (
            r"(n_head_kv|hidden_size|d_model|n_embd|vocab_size|max_position_embeddings|n_positions|n_ctx)",
            _COUNT,
        ),
        (
            r"max_(source|target)_positions|num_mel_bins|sampling_rate|sample_rate|hop_length|n_fft|feature_size",
            _COUNT,
        ),
        (
            r"patch_size|image_size|num_channels|in_channels|out_channels|num_train_timesteps",
            _COUNT,
        ),
        # -1 means "none" or "all" in published files.
        (
            r"(num|n|max)_.*|.*_(size|dim|heads|layers|rank|channels|experts|groups|positions)",
            _Range(-1, 2**63 - 1),
        ),
    )
)
_ROPE_RULES: tuple[tuple[re.Pattern[str], _Range], ...] = tuple(
    (re.compile(pattern), allowed)
    for pattern, allowed in (
        (r"(.*_)?factor", _POSITIVE),
        (r"beta_(fast|slow)", _Range(0)),
        (r"original_max_position_embeddings", _COUNT),
    )
)


def check_numbers(folder: Path) -> None:
    """Raise ConfigError for the first impossible number in the folder's configs.

    Absent files are skipped.
    """
    for name in FILES:
        path = folder / name
        if path.is_file():
            for fault in faults(_read(path)):
                raise ConfigError(f"{path}: {fault}")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; copy it again") from error


def faults(config: Any) -> Iterator[str]:
    """Yield the faults of the numbers in a config: field, value, remedy.

    `config` is the contents of a JSON file.
    """
    yield from _walk(config, (), False)


def _walk(value: Any, path: tuple[str, ...], rope: bool) -> Iterator[str]:
    if len(path) > _DEEPEST:
        yield f"{_shown(path[:4])} is nested deeper than {_DEEPEST} levels; repair the file"
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(inner, (*path, key), rope or key in ROPE)
        yield from _undivided(value, path)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _walk(inner, (*path, str(number)), rope)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _of_number(value, path, rope)


def _of_number(value: float, path: tuple[str, ...], rope: bool) -> Iterator[str]:
    names = [part for part in path if not part.isdigit()]
    field, listed = (names[-1].lower() if names else ""), bool(path) and path[-1].isdigit()
    if isinstance(value, float) and not math.isfinite(value):
        if not (field in UNBOUNDED and math.isinf(value)):
            yield f"{_shown(path)}={value}: give a finite number"
        return
    allowed = _range_of(field, rope)
    if allowed is None or (
        listed and value == 0 and not rope
    ):  # an entry of a layer without the feature
        return
    if not allowed.allows(value):
        yield f"{_shown(path)}={_short(value)}: give {allowed}"


def _range_of(field: str, rope: bool) -> _Range | None:
    rules = (*_ROPE_RULES, *_RULES) if rope else _RULES
    return next((allowed for pattern, allowed in rules if pattern.fullmatch(field)), None)


def _undivided(config: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is int and type(shared) is int and shared > 0 and heads % shared:
        where = _shown((*path, "num_key_value_heads"))
        yield f"{where}={shared}: give a number that divides num_attention_heads={heads}"


def _shown(path: tuple[str, ...]) -> str:
    """Return a field's path as in `text_config.rope_scaling.short_factor[3]`."""
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path).lstrip(".")[:200]


def _short(value: float) -> str:
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value)
        if abs(value) < 10**20
        else "a larger integer"
    )
