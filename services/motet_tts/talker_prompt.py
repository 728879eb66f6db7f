"""Make a talker's requests: a prompt of codes, and the states that a thinker has of a reply.

The talker reads, one after the other: the states of the thinker's prompt; the token that begins a
text in a voice; the state of the reply's first token; then, with each code that it draws, the state
of the next token; the token that ends a text; and one that stands for silence, for as long as it
goes on. (`Qwen2_5OmniForConditionalGeneration.generate` in transformers)

Shapes: P tokens of the thinker's prompt, T of its reply, X width of its states.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from motet_models.omni import stage_config
from motet_shared.errors import ConfigError
from motet_shared.messages import Generate, Sampling

States = NDArray[np.float32]
_TABLE = "thinker.model.embed_tokens.weight"
_SAMPLING = {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.05}
_MAX_CODES = 4096
_NEVER = -100.0  # bias of a code that is not drawn


@dataclass(frozen=True, slots=True, eq=False)
class TalkerPrompt:
    """Hold what the talker of one checkpoint reads beside the states.

    begins: by voice, the embedding `[X]` of the token that begins a text. ends, pads: of those that
    end and follow it. mask, pad, bos: codes of the prompt. served_as: what decode calls the talker.
    """

    served_as: str
    begins: Mapping[str, States]
    ends: States
    pads: States
    mask: int
    pad: int
    bos: int
    greedy: bool

    @classmethod
    def load(
        cls, folder: Path, begins: Mapping[str, int], *, served_as: str, greedy: bool
    ) -> TalkerPrompt:
        """Read codes from config.json, and embeddings from the thinker's table; `begins`: tokens.

        Raises ConfigError for a checkpoint that lacks them.
        """
        config = json.loads((folder / "config.json").read_text())
        talker = stage_config(config, "talker")

        def number(name: str) -> int:
            value = talker.get(name)
            if not isinstance(value, int):
                raise ConfigError(
                    f"model={str(folder)!r}: talker_config.{name} is {value!r}; give the number of a token"
                )
            return value

        text = [number("tts_text_end_token_id"), number("tts_text_pad_token_id")]
        rows = _rows(folder, [*begins.values(), *text])
        return cls(
            served_as,
            dict(zip(begins, rows[: len(begins)], strict=True)),
            rows[-2],
            rows[-1],
            number("tts_codec_mask_token_id"),
            number("tts_codec_pad_token_id"),
            number("tts_codec_start_token_id"),
            greedy,
        )

    def request(self, prompt_tokens: int, seed: int) -> Generate:
        """Return the request for a reply's codes, without its states."""
        settings: dict[str, Any] = dict(_SAMPLING)
        if self.greedy:
            settings["temperature"] = 0.0
        sampling = Sampling(
            **settings, seed=seed, max_tokens=_MAX_CODES, logit_bias={self.bos: _NEVER}
        )
        prompt = [self.mask] * prompt_tokens + [self.pad, self.bos]
        return Generate(
            model=self.served_as, prompt=prompt, sampling=sampling, replaced=prompt_tokens
        )

    def states(self, voice: str, states_TX: States, prompt_tokens: int, *, ended: bool) -> States:
        """Return what the talker reads: of all tokens of prompt and reply that are known."""
        prompt, reply = states_TX[:prompt_tokens], states_TX[prompt_tokens:]
        end = [self.ends[None], self.pads[None]] if ended else []
        return np.concatenate([prompt, self.begins[voice][None], reply, *end])


def _rows(folder: Path, tokens: list[int]) -> list[States]:
    """Return rows of the thinker's table of embeddings. Raises ConfigError without it."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if _TABLE in file.keys():  # noqa: SIM118  # no dictionary
                table = file.get_slice(_TABLE)
                return [table[token : token + 1][0].float().numpy() for token in tokens]
    raise ConfigError(f"model={str(folder)!r}: no {_TABLE} in it; give the whole checkpoint")
