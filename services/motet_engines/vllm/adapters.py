"""Read LoRA adapters as PEFT saves them, for requests to vLLM, which computes with them itself."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet_shared.errors import ConfigError

RANKS = (8, 16, 32, 64, 128, 256, 512)  # that every release of vLLM takes as a highest one
_AT_A_TIME = 8  # adapters of a batch, each of which takes memory for the highest rank


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Hold an adapter: its name, its folder, its highest rank, and a number that only it has."""

    name: str
    folder: str
    rank: int
    number: int


def read_adapters(entries: Iterable[str], model: str) -> dict[str, Adapter]:
    """Return adapters by name, from entries NAME=FOLDER.

    model: the name of the model, which no adapter may have. Raises ConfigError.
    """
    found: dict[str, Adapter] = {}
    for number, entry in enumerate(entries, 1):
        name, _, folder = entry.partition("=")
        if not name or not folder:
            raise _wrong(f"{entry!r} lacks a name or a folder; give NAME=FOLDER")
        if name == model or name in found:
            raise _wrong(f"{entry!r}: the name is there twice; give another")
        path = Path(folder).resolve()
        found[name] = Adapter(name=name, folder=str(path), rank=_rank(path), number=number)
    return found


def adapter_arguments(adapters: Iterable[Adapter]) -> dict[str, str]:
    """Return the arguments by which vLLM has room for adapters. Raises ConfigError."""
    every = list(adapters)
    if not every:
        return {}
    largest = max(every, key=lambda adapter: adapter.rank)
    rank = next((rank for rank in RANKS if rank >= largest.rank), None)
    if rank is None:
        raise _wrong(f"{largest.name!r} has rank {largest.rank}; vLLM takes {RANKS[-1]} at most")
    return {
        "--enable-lora": "",
        "--max-lora-rank": str(rank),
        "--max-loras": str(min(len(every), _AT_A_TIME)),
        "--max-cpu-loras": str(len(every)),
    }


def _rank(folder: Path) -> int:
    file = folder / "adapter_config.json"
    try:
        config: Any = json.loads(file.read_text())
        return max(int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values()), 1)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _wrong(
            f"cannot read {str(file)!r} ({error!r}); give a folder saved by PEFT"
        ) from None


def _wrong(message: str) -> ConfigError:
    return ConfigError(f"adapters: {message}", param="adapters")
