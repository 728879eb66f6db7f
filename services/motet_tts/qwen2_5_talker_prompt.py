"""Ask Qwen2.5-Omni's talker for codes: a prompt of codes, and the states that it adds to them.

The talker reads, one after the other: the states of the thinker's prompt; the token that begins a
text in a voice; the state of the reply's first token; then, with each code that it draws, the state
of the next token; the token that ends a text; and one that stands for silence, for as long as it
goes on. (`Qwen2_5OmniForConditionalGeneration.generate` in transformers)

Shapes: T tokens of prompt and reply, W numbers of a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from motet_shared.messages import Generate, Sampling

from .talker_prompt import MAX_FRAMES, NEVER, States, TalkerPrompt, TalkerSettings

_SAMPLING = {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.05}


@dataclass(frozen=True, slots=True, eq=False)
class Qwen25TalkerPrompt(TalkerPrompt):
    """Hold what the talker of one checkpoint reads beside the states.

    begins: by voice, the embedding `[W]` of the token that begins a text. ends, pads: of those that
    end and follow it. mask, pad, bos: codes of the prompt.
    """

    served_as: str
    begins: Mapping[str, States]
    ends: States
    pads: States
    mask: int
    pad: int
    bos: int
    greedy: bool
    groups: int = 1

    @classmethod
    def load(
        cls, folder: Path, begins: Mapping[str, int], *, served_as: str, greedy: bool
    ) -> Qwen25TalkerPrompt:
        """Read codes from config.json, and embeddings from the thinker's table; `begins`: tokens.

        Raises ConfigError for a checkpoint that lacks them.
        """
        settings = TalkerSettings(folder)
        text = [settings.code("tts_text_end_token_id"), settings.code("tts_text_pad_token_id")]
        rows = settings.rows([*begins.values(), *text])
        return cls(
            served_as,
            dict(zip(begins, rows[: len(begins)], strict=True)),
            rows[-2],
            rows[-1],
            settings.code("tts_codec_mask_token_id"),
            settings.code("tts_codec_pad_token_id"),
            settings.code("tts_codec_start_token_id"),
            greedy,
        )

    def request(self, voice: str, states_TW: States, prompt_tokens: int, seed: int) -> Generate:
        settings: dict[str, Any] = dict(_SAMPLING)
        if self.greedy:
            settings["temperature"] = 0.0
        sampling = Sampling(
            **settings, seed=seed, max_tokens=MAX_FRAMES, logit_bias={self.bos: NEVER}
        )
        prompt = [self.mask] * prompt_tokens + [self.pad, self.bos]
        return Generate(
            model=self.served_as, prompt=prompt, sampling=sampling, replaced=prompt_tokens
        )

    def states(self, voice: str, states_TW: States, prompt_tokens: int, *, ended: bool) -> States:
        prompt, reply = states_TW[:prompt_tokens], states_TW[prompt_tokens:]
        end = [self.ends[None], self.pads[None]] if ended else []
        return np.concatenate([prompt, self.begins[voice][None], reply, *end])
