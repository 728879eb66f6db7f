"""Choose the files of a repository that serving needs: configuration, tokenizer, safetensors.

A repository may also hold the same weights in other formats (PyTorch pickles, ONNX, TensorFlow),
examples and pictures; none of that is fetched. Files that run code when they are read are never
chosen.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import PurePosixPath

from motet_shared.errors import ConfigError

from .reference import HubReference

# Configuration, tokenizer and chat templates.
_SMALL = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
# Folders with the same model for other engines.
_FOREIGN = frozenset({"onnx", "openvino", "original", "coreml", "tflite", "gguf", "metal"})
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}\.safetensors")
_GGUF_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
# Weights of one component, as transformers, diffusers, sentence-transformers and PEFT name them.
_WEIGHTS = frozenset(
    {"model.safetensors", "diffusion_pytorch_model.safetensors", "adapter_model.safetensors"}
)
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt"})


def select_files(reference: HubReference, paths: Collection[str]) -> list[str]:
    """Return the paths of a repository that serving the reference needs, sorted.

    Raises ConfigError if the repository has no weights that can be served, or lacks the GGUF file.
    """
    paths = [path for path in paths if _is_safe(path)]
    if reference.file is not None:
        return _select_gguf(reference, paths)
    chosen = sorted(
        path for path in paths if _is_configuration(path) or _is_weights(path) or _is_voice(path)
    )
    if not any(_is_weights(path) for path in chosen):
        raise ConfigError(f"{reference}: {_refusal(reference, paths)}")
    return chosen


def is_adapter(paths: Collection[str]) -> bool:
    """Return True for the files of a LoRA adapter as PEFT saves it."""
    return "adapter_config.json" in paths and "config.json" not in paths


def _select_gguf(reference: HubReference, paths: Collection[str]) -> list[str]:
    assert reference.file is not None
    if reference.file not in paths:
        raise ConfigError(
            f"{reference}: the repository has no such file; it has {_list_gguf(paths) or 'no GGUF file'}"
        )
    match = _GGUF_PART.fullmatch(reference.file)
    if match is None:
        return [reference.file]
    count = int(match["count"])
    parts = [f"{match['stem']}-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1)]
    if absent := [part for part in parts if part not in paths]:
        raise ConfigError(f"{reference}: the repository lacks {absent[0]}; choose another file")
    return parts


def _refusal(reference: HubReference, paths: Collection[str]) -> str:
    """Return the reason why nothing can be served, and the remedy."""
    if files := _list_gguf(paths):
        return f"it has GGUF files; name one, such as {reference.repository}:{files.split(', ')[0]}"
    if any(PurePosixPath(path).suffix in _PICKLES for path in paths):
        return (
            "its weights are PyTorch pickles, which execute code when they are loaded;"
            " choose a repository or a revision with safetensors"
        )
    return "it has no safetensors; choose a repository of a checkpoint"


def _list_gguf(paths: Collection[str]) -> str:
    found = sorted(path for path in paths if path.endswith(".gguf"))
    return ", ".join(found[:8]) + (", …" if len(found) > 8 else "")


def _is_safe(path: str) -> bool:
    """Return True for a relative path that stays in its folder on every system."""
    parts = path.split("/")
    return not any(part in ("", ".", "..") for part in parts) and not set(path) & {"\\", ":", "\0"}


def _is_configuration(path: str) -> bool:
    parts = PurePosixPath(path)
    return (
        parts.suffix in _SMALL
        and not _FOREIGN & set(parts.parts[:-1])
        and not parts.name.endswith((".bin.index.json", ".fp16.json"))
        and not parts.name.startswith(".")
    )


def _is_voice(path: str) -> bool:
    """Return True for a voice of a speech model: voices/NAME.safetensors, or the default one."""
    parts = PurePosixPath(path)
    return parts.suffix == ".safetensors" and (
        parts.parts[:-1] == ("voices",) or path == "default-voice.safetensors"
    )


def _is_weights(path: str) -> bool:
    """Return True for safetensors of a component's standard name; variants such as fp16 have others."""
    parts = PurePosixPath(path)
    if parts.suffix != ".safetensors" or _FOREIGN & set(parts.parts[:-1]):
        return False
    shard = _SHARD.fullmatch(parts.name)
    return (f"{shard['stem']}.safetensors" if shard else parts.name) in _WEIGHTS
