"""Define what asks a talker for the codes of a reply: its prompt, and the states that it reads.

Shapes: P tokens of the thinker's prompt, T of prompt and reply, W numbers of a state, M states that
the talker reads.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from motet_models.omni import stage_config
from motet_shared.errors import ConfigError
from motet_shared.messages import Generate

States = NDArray[np.float32]
Positions = NDArray[np.int32]
MAX_FRAMES = 4096
NEVER = -100.0  # bias of a code that is not drawn
_TABLE = "thinker.model.embed_tokens.weight"


class TalkerPrompt(ABC):
    """Make the requests of the talker of one checkpoint.

    served_as: what decode calls it. groups: codes of a frame.
    """

    served_as: str
    groups: int

    @abstractmethod
    def request(self, voice: str, states_TW: States, prompt_tokens: int, seed: int) -> Generate:
        """Return the request for a reply's codes, without its states."""

    @abstractmethod
    def states(self, voice: str, states_TW: States, prompt_tokens: int, *, ended: bool) -> States:
        """Return what the talker reads `[M, W]`: of all tokens of prompt and reply that are known."""

    def positions(self, positions_3P: Positions, states_TW: States) -> Positions:
        """Return rotary positions of the talker's first tokens, of those of the thinker's prompt."""
        return positions_3P


class TalkerSettings:
    """Read numbers of tokens and codes in a checkpoint's config.json, and rows of its embeddings."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.whole: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.talker = stage_config(self.whole, "talker")

    def code(self, name: str) -> int:
        """Return a field of the talker's config. Raises ConfigError if it is no number."""
        return self._number(f"talker_config.{name}", self.talker.get(name))

    def token(self, name: str) -> int:
        """Return a field of the whole config. Raises ConfigError if it is no number."""
        return self._number(name, self.whole.get(name))

    def _number(self, name: str, value: Any) -> int:
        if not isinstance(value, int):
            raise ConfigError(
                f"model={str(self._folder)!r}: {name} is {value!r}; give the number of a token"
            )
        return value

    def rows(self, tokens: Sequence[int]) -> list[States]:
        """Return rows of the thinker's table of embeddings. Raises ConfigError without it."""
        for path in sorted(self._folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                if _TABLE in file.keys():  # noqa: SIM118  # no dictionary
                    table = file.get_slice(_TABLE)
                    return [table[token : token + 1][0].float().numpy() for token in tokens]
        raise ConfigError(
            f"model={str(self._folder)!r}: no {_TABLE} in it; give the whole checkpoint"
        )
