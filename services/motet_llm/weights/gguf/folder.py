"""Make the checkpoint folder that a lone GGUF file stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from motet_models.checkpoints import derived

from .config import config_of
from .header import Header, parts_of, read_header
from .tokenizer import build_tokenizer, end_ids

_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def default_folder(file: Path) -> Path:
    """Return the place for the folder of a file: under the cache, by the file's path."""
    return derived.GGUF.target(file)


def make_folder(file: Path, target: Path) -> Path:
    """Make a checkpoint folder of a file at `target`, and return it.

    A folder that was made of the same file is kept; several processes may do this at once. Raises
    ConfigError if the file cannot be served, or `target` cannot be written or is something else.
    """
    parts = parts_of(derived.absolute(file))

    def write(made: Path) -> None:
        _write(read_header(parts[0]), made)
        for part in parts:
            (made / part.name).symlink_to(part)

    return derived.GGUF.make(parts, target, write)


def _write(header: Header, folder: Path) -> None:
    """Write all files but the link."""
    (folder / "config.json").write_text(json.dumps(config_of(header), indent=1))
    (folder / "generation_config.json").write_text(json.dumps(_generation(header), indent=1))
    build_tokenizer(header).save_pretrained(folder)


def _generation(header: Header) -> dict[str, Any]:
    """Return generation_config.json: what ends a reply, and the sampling that the file recommends."""
    found: dict[str, Any] = {"eos_token_id": end_ids(header)} if end_ids(header) else {}
    for gguf_name, name in _SAMPLING.items():
        value = header.fields.get(f"general.sampling.{gguf_name}")
        if isinstance(value, int | float):
            found |= {name: value, "do_sample": True}
    return found
