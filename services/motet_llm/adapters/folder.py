"""Read a LoRA adapter's folder as PEFT saves it, or give the reason why it cannot be served.

`adapter_config.json` says how it was trained, `adapter_model.safetensors` holds a pair of factors
for each matrix. Both are read here without peft: settings that the engine does not implement are
refused by name, and so is a tensor that is missing, left over or misshapen.
`base_model_name_or_path` is no reason to refuse: the same model has one name on a hub and another
one in every folder it was copied to. A model is identified by the names and shapes of its matrices;
one that agrees in all of these but was trained into something else cannot be told apart, and its
name is only logged.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from motet_shared.errors import BadRequest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PIECE = 1 << 14  # numbers that are checked at once
_PREFIX = "base_model.model."
_OWN, _DEEPER = "model.", ("model.language_model.", "language_model.model.", "model.text_model.")
_ALL = ("all-linear", "all_linear")
# Settings that change more than the product of a matrix; each is off where its value is false.
_REFUSED = {
    "use_dora": "DoRA scales whole matrices; train plain LoRA",
    "modules_to_save": "it replaces whole modules of the model; train it without, or merge it into the model",
    "lora_bias": "its factors have biases; train it without",
    "trainable_token_indices": "it replaces embeddings of tokens; merge it into the model",
    "target_parameters": "it changes parameters that are no linear modules, such as experts; merge it into the model",
    "layer_replication": "it repeats layers; merge it into the model",
    "alora_invocation_tokens": "it is switched on by tokens of the prompt; train plain LoRA",
    "use_qalora": "its inputs are pooled; train plain LoRA",
    "use_bdlora": "its factors are in blocks; train plain LoRA",
    "arrow_config": "it routes among adapters; name one of them",
    "kasa_config": "its factors have singular values; train plain LoRA",
    "monteclora_config": "it has weights beside its factors; train plain LoRA",
}
_PLAIN_BEGINNINGS = (
    True,
    False,
    None,
    "gaussian",
    "eva",
    "orthogonal",
)  # other initializations change the model's weights


@dataclass(frozen=True, slots=True)
class Pair:
    """Name one matrix's factors, and hold their rank and their scale.

    The tensors are `down` `[rank, inputs]` and `up` `[outputs, rank]`.
    """

    down: str
    up: str
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """Hold what is known of an adapter that fits a model.

    pairs: by the matrix's name in the model.
    digest: of both files' contents.
    base: name of the model that it was trained for, as its config gives it.
    """

    name: str
    path: Path
    pairs: Mapping[str, Pair]
    digest: str
    created: int
    base: str

    @classmethod
    def read(
        cls, name: str, path: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int
    ) -> AdapterFolder:
        """Check everything but the numbers of the factors.

        shapes: (outputs, inputs) of the model's matrices that can be adapted. Raises BadRequest
        that names the file, the field or tensor, and the remedy.
        """
        where = _Where(name, path)
        config = _read_config(where)
        _check_config(where, config)
        found = _tensors(where)
        own = _own_names(found, shapes)
        trained = {name: shapes[ours] for name, ours in own.items()}
        pairs = {
            matrix: _pair(where, config, matrix)
            for matrix in _targets(where, config, found, trained)
        }
        _check_tensors(where, config, found, pairs, trained, max_rank)
        return cls(
            name=name,
            path=path,
            pairs={own[matrix]: pair for matrix, pair in pairs.items()},
            digest=_digest(where, _contents(where)),
            created=int((path / CONFIG).stat().st_mtime),
            base=str(config.get("base_model_name_or_path") or ""),
        )

    def load(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the factors by matrix.

        Raises BadRequest if the files have changed since `read`, or hold NaN or infinity.
        """
        where = _Where(self.name, self.path)
        contents = _contents(where)
        if _digest(where, contents) != self.digest:
            raise where.refuse(
                "its files have changed since the worker started; restart it, or put them back"
            )
        tensors = load(contents)
        for key, tensor in tensors.items():
            # In pieces: for larger tensors, torch would use the threads that compute steps.
            if not all(bool(part.isfinite().all()) for part in tensor.flatten().split(_PIECE)):
                raise where.refuse(f"{key} holds NaN or infinity; save it again")
        return {
            matrix: (tensors[pair.down], tensors[pair.up]) for matrix, pair in self.pairs.items()
        }


@dataclass(frozen=True, slots=True)
class _Where:
    name: str
    path: Path

    def refuse(self, reason: str) -> BadRequest:
        return BadRequest(f"model: adapter {self.name!r} ({self.path}): {reason}", param="model")


# ---------------------------------------------------------------------------------------------------------------- files
def _read_config(where: _Where) -> dict[str, Any]:
    try:
        config = json.loads((where.path / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise where.refuse(
            f"{CONFIG} cannot be read: {error}; give a folder that PEFT has saved"
        ) from error
    if not isinstance(config, dict):
        raise where.refuse(
            f"{CONFIG} is a {type(config).__name__}, no object; give a folder that PEFT has saved"
        )
    return config


def _tensors(where: _Where) -> dict[str, list[int]]:
    """Return the shapes of the file's tensors by name. Raises BadRequest if it cannot be read."""
    file = where.path / WEIGHTS
    try:
        with file.open("rb"), safe_open(file, framework="pt") as weights:
            return {key: weights.get_slice(key).get_shape() for key in weights.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise where.refuse(
            f"{WEIGHTS} cannot be read: {error}; copy it again, as safetensors"
        ) from error


def _contents(where: _Where) -> bytes:
    try:
        return (where.path / WEIGHTS).read_bytes()
    except OSError as error:
        raise where.refuse(f"{WEIGHTS} cannot be read: {error}; copy it again") from error


def _digest(where: _Where, contents: bytes) -> str:
    try:
        config = (where.path / CONFIG).read_bytes()
    except OSError as error:
        raise where.refuse(f"{CONFIG} cannot be read: {error}; copy it again") from error
    return hashlib.blake2b(
        contents, digest_size=16, key=hashlib.blake2b(config).digest()
    ).hexdigest()


# --------------------------------------------------------------------------------------------------------------- config
def _check_config(where: _Where, config: Mapping[str, Any]) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise where.refuse(f"peft_type={kind!r}; only LORA is served")
    for setting, reason in _REFUSED.items():
        if value := config.get(setting):
            raise where.refuse(f"{setting}={value!r}: {reason}")
    if (bias := config.get("bias", "none")) != "none":
        raise where.refuse(
            f"bias={bias!r}: biases of the model were trained; train it with bias='none'"
        )
    if (begun := config.get("init_lora_weights", True)) not in _PLAIN_BEGINNINGS:
        raise where.refuse(
            f"init_lora_weights={begun!r}: it belongs to a changed model; "
            "save it with path_initial_model_for_weight_conversion"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    for setting, value in (("r", rank), ("lora_alpha", alpha)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise where.refuse(f"{setting}={value!r}; it must be a number above 0")
    for setting in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(setting) or {}, dict):
            raise where.refuse(f"{setting}={config[setting]!r}; it must be numbers by module")


def _pair(where: _Where, config: Mapping[str, Any], matrix: str) -> Pair:
    rank = _by_pattern(where, config, "rank_pattern", matrix, config["r"])
    alpha = _by_pattern(where, config, "alpha_pattern", matrix, config["lora_alpha"])
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    return Pair(
        f"{_PREFIX}{matrix}.lora_A.weight", f"{_PREFIX}{matrix}.lora_B.weight", int(rank), scale
    )


def _by_pattern(
    where: _Where, config: Mapping[str, Any], setting: str, matrix: str, otherwise: float
) -> float:
    """Return the value of the first pattern that matches the end of a name, as PEFT does."""
    for pattern, value in (config.get(setting) or {}).items():
        if _matches(where, setting, rf"(.*\.)?({pattern})$", matrix):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise where.refuse(f"{setting}[{pattern!r}]={value!r}; it must be a number above 0")
            return value
    return otherwise


def _matches(where: _Where, setting: str, pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise where.refuse(f"{setting}: {pattern!r} is no regular expression: {error}") from error


# -------------------------------------------------------------------------------------------------------------- targets
def _targets(
    where: _Where,
    config: Mapping[str, Any],
    found: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, int]],
) -> list[str]:
    """Return the matrices of model and file that the config's `target_modules` select."""
    named = config.get("target_modules")
    in_file = list(
        dict.fromkeys(matrix for key in found if (matrix := _matrix_of(key)) is not None)
    )
    if not named:
        raise where.refuse(f"target_modules={named!r}; it must name the modules that were trained")
    # Modules that cannot be adapted here (such as the head) count where the file has them, so that
    # the error names them.
    candidates = dict.fromkeys([*shapes, *in_file])
    if isinstance(named, str) and named.lower() in _ALL:
        chosen = [matrix for matrix in candidates if matrix in shapes]
    elif isinstance(named, str):
        chosen = [
            matrix
            for matrix in candidates
            if _matches(where, "target_modules", rf"(?:{named})\Z", matrix)
        ]
    elif isinstance(named, list) and all(isinstance(one, str) for one in named):
        chosen = [m for m in candidates if _is_one_of(m, named) and _in_layers(where, config, m)]
    else:
        raise where.refuse(f"target_modules={named!r}; it must be names or a regular expression")
    return [
        matrix
        for matrix in chosen
        if not _is_excluded(where, config.get("exclude_modules"), matrix)
    ]


def _own_names(found: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, str]:
    """Map the names that matrices had in training to the model's.

    Checkpoints of multimodal models have deeper names.
    """
    for deeper in _DEEPER:
        if any(key.startswith(_PREFIX + deeper) for key in found):
            return {
                deeper + name.removeprefix(_OWN): name for name in shapes if name.startswith(_OWN)
            }
    return {name: name for name in shapes}


def _matrix_of(key: str) -> str | None:
    match = re.fullmatch(re.escape(_PREFIX) + r"(.+)\.lora_[AB]\.weight", key)
    return match[1] if match else None


def _is_one_of(matrix: str, names: Sequence[str]) -> bool:
    return any(matrix == name or matrix.endswith(f".{name}") for name in names)


def _is_excluded(where: _Where, excluded: Any, matrix: str) -> bool:
    if not excluded:
        return False
    if isinstance(excluded, str):
        return _matches(where, "exclude_modules", rf"(?:{excluded})\Z", matrix)
    return _is_one_of(matrix, excluded)


def _in_layers(where: _Where, config: Mapping[str, Any], matrix: str) -> bool:
    """Return True if a matrix is in one of `layers_to_transform`, found by `layers_pattern`."""
    wanted = config.get("layers_to_transform")
    if wanted is None or wanted == []:
        return True
    numbers = [wanted] if isinstance(wanted, int) else wanted
    given = config.get("layers_pattern") or []
    patterns = [given] if isinstance(given, str) else given
    expressions = [rf"(?:^|.*?\.){one}\.(\d+)\." for one in patterns] or [r".*?\.[^.]*\.(\d+)\."]
    try:
        found = next((match for one in expressions if (match := re.match(one, matrix))), None)
    except re.error as error:
        raise where.refuse(f"layers_pattern={given!r} is no regular expression: {error}") from error
    return found is not None and int(found[1]) in numbers


# -------------------------------------------------------------------------------------------------------------- tensors
def _check_tensors(
    where: _Where,
    config: Mapping[str, Any],
    found: Mapping[str, list[int]],
    pairs: Mapping[str, Pair],
    shapes: Mapping[str, tuple[int, int]],
    max_rank: int,
) -> None:
    if not pairs:
        raise where.refuse(
            f"target_modules={config['target_modules']!r}: this model has no such modules{_whose(config)}"
        )
    if foreign := [matrix for matrix in pairs if matrix not in shapes]:
        raise where.refuse(
            f"{_some(foreign)} cannot be adapted in this model; train other target_modules{_whose(config)}"
        )
    if (rank := max(pair.rank for pair in pairs.values())) > max_rank:
        raise where.refuse(f"r={rank} is above --max-rank={max_rank}; raise it")
    due = {
        key: shape for matrix, pair in pairs.items() for key, shape in _due(pair, shapes[matrix])
    }
    if missing := [key for key in due if key not in found]:
        raise where.refuse(f"{WEIGHTS} lacks {_some(missing)}; save it again{_whose(config)}")
    if extra := [key for key in found if key not in due]:
        raise where.refuse(
            f"{WEIGHTS} has {_some(extra)} beyond what target_modules name; save it again"
        )
    for key, shape in due.items():
        if found[key] != shape:
            raise where.refuse(
                f"{key} is {found[key]}, must be {shape}: it is another model's{_whose(config)}"
            )


def _due(pair: Pair, shape: tuple[int, int]) -> Iterator[tuple[str, list[int]]]:
    outputs, inputs = shape
    yield pair.down, [pair.rank, inputs]
    yield pair.up, [outputs, pair.rank]


def _whose(config: Mapping[str, Any]) -> str:
    base = config.get("base_model_name_or_path")
    return f" (it was trained for {base!r})" if base else ""


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
