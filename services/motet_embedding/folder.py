"""Read a model folder's description: its transformer, pooling, later modules and prompts.

Supports sentence-transformers (`modules.json`) and plain transformers folders; weights are not
read.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from motet_shared.errors import ConfigError

from .pooling import MODES, Pooling

# What a folder computes: one vector of a text, one of each of its tokens, one of a text or picture,
# or a score of a pair of texts, by a classification head or by the logits of two tokens.
Kind = Literal["text vectors", "token vectors", "picture vectors", "pair scores", "token logits"]
_TRANSFORMERS = ("Transformer", "CLIPModel")  # modules that have a checkpoint
_PICTURES = re.compile(r"(CLIP|Siglip|Siglip2)Model")  # architectures
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
    """Describe a sentence encoder or a ranker on disk.

    kind: what it computes; of a plain folder of transformers, by its architecture.
    transformer: folder of its config.json, weights and tokenizer.json.
    pooling: None if the folder does not specify it.
    dense: folders of dense layers after the pooling, in order.
    normalized: whether vectors get unit length; None: not specified.
    prompts: texts that precede a text, by name.
    architecture: the class in its config.json; empty: not specified.
    modules: kinds and folders in modules.json; empty for a plain folder.
    settings: config_sentence_transformers.json.
    limits: the most tokens of a text, as given in its files.
    """

    root: Path
    transformer: Path
    kind: Kind = "text vectors"
    architecture: str = ""
    modules: tuple[tuple[str, Path], ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
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
        modules = _modules(root)
        texts = _read_object(root / "config_sentence_transformers.json")
        transformer = next((path for name, path in modules if name in _TRANSFORMERS), root)
        architecture = _architecture(transformer)
        kind = _kind(architecture, [kind for kind, _ in modules], texts)
        pooling: Pooling | None = None
        dense: tuple[Path, ...] = ()
        normalized: bool | None = None
        if modules and kind == "text vectors":
            pooling, dense, normalized = _after_tokens(root, modules)
        elif modules and kind == "picture vectors":
            normalized = "Normalize" in [name for name, _ in modules]
        elif kind == "token vectors":
            dense = tuple(path for name, path in modules if name == "Dense")
        settings = _read_object(transformer / "sentence_bert_config.json")
        prompts = {
            name: text
            for name, text in (texts.get("prompts") or {}).items()
            if isinstance(text, str)
        }
        return cls(
            root=root,
            transformer=transformer,
            kind=kind,
            architecture=architecture,
            modules=tuple(modules),
            settings=texts,
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


def _read_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; an empty one for a missing file or any other value."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def _architecture(transformer: Path) -> str:
    names = _read_object(transformer / "config.json").get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _kind(architecture: str, modules: list[str], settings: dict[str, Any]) -> Kind:
    if _PICTURES.fullmatch(architecture):
        return "picture vectors"
    if architecture == "HF_ColBERT" or "MultiVectorMask" in modules:
        return "token vectors"
    if settings.get("model_type") in ("ColBERT", "MultiVectorEncoder"):
        return "token vectors"
    if "LogitScore" in modules:
        return "token logits"
    if settings.get("model_type") == "CrossEncoder":
        return "token logits" if architecture.endswith("ForCausalLM") else "pair scores"
    return "pair scores" if architecture.endswith("ForSequenceClassification") else "text vectors"


def _modules(root: Path) -> list[tuple[str, Path]]:
    found = read_json(root / "modules.json")
    if found is None:
        return []
    try:
        return [(str(one["type"]).rpartition(".")[2], root / str(one["path"])) for one in found]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"model={str(root)!r}: modules.json is no list of modules with type and path; "
            "save the folder again"
        ) from error


def _after_tokens(
    root: Path, modules: list[tuple[str, Path]]
) -> tuple[Pooling | None, tuple[Path, ...], bool]:
    """Return the pooling, the dense layers and whether vectors are normalized."""
    order = {"Transformer": 0, "Pooling": 1, "Dense": 2, "Normalize": 3}
    places = [order.get(kind, -1) for kind, _ in modules]
    if -1 in places:
        raise ConfigError(
            f"model={str(root)!r}: modules.json has a {modules[places.index(-1)][0]}, which is not supported; "
            f"there are {', '.join(order)}"
        )
    if places[:2] != [0, 1] or places != sorted(places) or places.count(0) + places.count(1) != 2:
        found = ", ".join(kind for kind, _ in modules)
        raise ConfigError(
            f"model={str(root)!r}: modules.json has {found}; {', '.join(order)} are served in this order"
        )
    dense = tuple(path for kind, path in modules if kind == "Dense")
    return _pooling(modules[1][1]), dense, 3 in places


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
