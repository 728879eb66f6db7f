"""Read from a config.json the longest sequences for which a model was trained.

Rotary embeddings are scaled in several ways, and a config states either the original length or the
one after scaling. The rules are those of transformers' formulas (`modeling_rope_utils`):

* `yarn` scales the original length by its factor, and so does `dynamic` with
  `max_position_embeddings`, beyond which alone its formula applies;
* `longrope`, `llama3` and all others state the trained length as `max_position_embeddings`; with
  `linear` scaling some configs state it as `max_sequence_length`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Names of the longest sequence in the configs of model families, in order of preference.
_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "seq_length",
    "model_max_length",
)


def trained_context(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence of a text model in tokens; None if its config names none.

    config: the contents of config.json, or of its text part.
    """
    stated = next((size for name in _FIELDS if (size := _count(config.get(name)))), None)
    lengths = [stated or 0]
    for rope in rope_settings(config):
        kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
        if not isinstance(factor, int | float) or not factor >= 1:
            continue
        if kind == "yarn":
            lengths.append(int(original_length(config, rope) * factor))
        elif kind == "dynamic":
            lengths.append(int((stated or 0) * factor))
        elif kind == "linear":
            lengths.append(_count(config.get("max_sequence_length")))
    return max(lengths) or None


def original_length(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    """Return the length in tokens up to which a rotary embedding is not scaled; 0 if unknown.

    As in transformers, a field of the config precedes that of the embedding, except for `dynamic`,
    which knows `max_position_embeddings` only.
    """
    names = [config.get("original_max_position_embeddings")]
    names += [rope.get("original_max_position_embeddings")]
    if rope.get("rope_type", rope.get("type")) == "dynamic":
        names = []
    return next(filter(None, map(_count, [*names, config.get("max_position_embeddings")])), 0)


def rope_settings(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each rotary embedding: one, or one per type of layer."""
    found = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(found, Mapping):
        return
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    if nested and all(value is None or isinstance(value, Mapping) for value in found.values()):
        yield from nested
    else:
        yield found


def _count(value: Any) -> int:
    """Return a positive whole number as it is, and 0 for everything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
