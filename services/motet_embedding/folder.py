"""Read a model folder's description: its transformer, pooling, later modules and prompts.

Supports sentence-transformers (`modules.json`) and plain transformers folders; weights are not
read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motet_shared.errors import ConfigError

from .pooling import MODES, Pooling

_UNLIMITED = 10**9  # above this, transformers' tokenizers mean "no limit"
# Names of the poolings in older folders.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Describe a sentence encoder on disk.

    transformer: folder of its config.json, weights and tokenizer.json.
    pooling: None if the folder does not specify it.
    dense: folders of dense layers after the pooling, in order.
    normalized: whether vectors get unit length; None: not specified.
    prompts: texts that precede a text, by name.
    limits: the most tokens of a text, as given in its files.
    """

    root: Path
    transformer: Path
    pooling: Pooling | None = None
    dense: tuple[Path, ...] = ()
    normalized: bool | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    lower: bool = False
    limits: tuple[int, ...] = ()

    @classmethod
    def read(cls, path: str | Path) -> Folder:
        """Read a folder. Raises ConfigError that names what is unreadable or not supported."""
        root = Path(path)
        modules = read_json(root / "modules.json")
        if modules is None:
            return cls(root=root, transformer=root, limits=_limits(root, {}))
        transformer, pooling, dense, normalized = _modules(root, modules)
        settings = read_json(transformer / "sentence_bert_config.json") or {}
        texts = read_json(root / "config_sentence_transformers.json") or {}
        prompts = {
            name: text
            for name, text in (texts.get("prompts") or {}).items()
            if isinstance(text, str)
        }
        return cls(
            root=root,
            transformer=transformer,
            pooling=pooling,
            dense=dense,
            normalized=normalized,
            prompts=prompts,
            default_prompt=_default_prompt(root, prompts, texts.get("default_prompt_name")),
            lower=bool(settings.get("do_lower_case")),
            limits=_limits(transformer, settings),
        )


def read_json(path: Path) -> Any:
    """Return a file's JSON; None if there is no such file. Raises ConfigError if it is invalid."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model={str(path.parent)!r}: {path.name} cannot be read: {error}"
        ) from error


def _modules(root: Path, modules: Any) -> tuple[Path, Pooling | None, tuple[Path, ...], bool]:
    kinds = [(str(one["type"]).rpartition(".")[2], root / str(one["path"])) for one in modules]
    order = {"Transformer": 0, "Pooling": 1, "Dense": 2, "Normalize": 3}
    places = [order.get(kind, -1) for kind, _ in kinds]
    if -1 in places:
        raise ConfigError(
            f"model={str(root)!r}: modules.json has a {kinds[places.index(-1)][0]}, which is not supported; "
            f"there are {', '.join(order)}"
        )
    if places[:2] != [0, 1] or places != sorted(places) or places.count(0) + places.count(1) != 2:
        found = ", ".join(kind for kind, _ in kinds)
        raise ConfigError(
            f"model={str(root)!r}: modules.json has {found}; {', '.join(order)} are served in this order"
        )
    dense = tuple(path for kind, path in kinds if kind == "Dense")
    return kinds[0][1], _pooling(kinds[1][1]), dense, 3 in places


def _pooling(path: Path) -> Pooling:
    config_json = read_json(path / "config.json")
    if not isinstance(config_json, dict):
        raise ConfigError(
            f"model={str(path)!r}: no config.json there, which says how tokens are pooled"
        )
    mode_name = config_json.get("pooling_mode")
    modes = [mode_name] if isinstance(mode_name, str) else list(mode_name or [])
    modes = modes or [mode for flag, mode in _FLAGS.items() if config_json.get(flag)]
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ConfigError(
            f"model={str(path)!r}: pooling {unknown[0]!r} is not supported; there are {', '.join(MODES)}"
        )
    if not modes:
        raise ConfigError(
            f"model={str(path)!r}: config.json chooses no pooling; set one of {', '.join(_FLAGS)}"
        )
    return Pooling(modes=tuple(modes), include_prompt=bool(config_json.get("include_prompt", True)))


def _default_prompt(root: Path, prompts: dict[str, str], name: Any) -> str:
    if name is None:
        return ""
    if name not in prompts:
        known = ", ".join(prompts) or "none"
        raise ConfigError(
            f"model={str(root)!r}: default_prompt_name {name!r} is no prompt of it; there are: {known}"
        )
    return str(name)


def _limits(transformer: Path, settings: dict[str, Any]) -> tuple[int, ...]:
    tokenizer = read_json(transformer / "tokenizer_config.json") or {}
    found = (settings.get("max_seq_length"), tokenizer.get("model_max_length"))
    return tuple(int(limit) for limit in found if limit and 0 < limit < _UNLIMITED)
