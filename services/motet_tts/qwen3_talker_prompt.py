"""Ask Qwen3-Omni's talker for codes: what a user said, and what the assistant answers.

A state is what the thinker has of a token, and the token's id. The talker reads the users' turns of
the prompt; the three tokens that begin the answer; four times silence, the token that begins a text
and the answer's first token, each with a code that says how to speak; then, with each frame that it
draws, the answer's next token; the token that ends a text; and silence for as long as it goes on.
(`Qwen3OmniMoeForConditionalGeneration.generate` in transformers)

Shapes: P tokens of the thinker's prompt, T of prompt and reply, W numbers of a state, U tokens of
users' turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet_shared.errors import BadRequest, ConfigError
from motet_shared.messages import Generate, Sampling

from .talker_prompt import MAX_FRAMES, NEVER, Positions, States, TalkerPrompt, TalkerSettings

_SAMPLING = {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05}
_RESERVED = 1024  # of the last codes; speech has none of them
_ROLE = 3  # tokens that begin a turn: a mark, the role, and a line break
_SILENCES = 4
_NO_TOKEN = -1.0  # in place of an id: the state is that of text


@dataclass(frozen=True, slots=True, eq=False)
class Qwen3TalkerPrompt(TalkerPrompt):
    """Hold what the talker of one checkpoint reads beside the states.

    voices: codes by name. begins, ends, pads: states `[W]` of the tokens that begin, end and follow
    a text. start, user, assistant: tokens of a turn's beginning. how: codes that say how to speak,
    before the one of the voice. pad, bos: codes behind it. vocab: number of codes.
    """

    served_as: str
    groups: int
    voices: Mapping[str, int]
    begins: States
    ends: States
    pads: States
    start: int
    user: int
    assistant: int
    how: tuple[int, ...]
    pad: int
    bos: int
    eos: int
    vocab: int
    greedy: bool

    @classmethod
    def load(cls, folder: Path, *, served_as: str, greedy: bool) -> Qwen3TalkerPrompt:
        """Read tokens and codes from config.json, and embeddings from the thinker's table.

        Raises ConfigError for a checkpoint that lacks them.
        """
        settings = TalkerSettings(folder)
        voices = settings.talker.get("speaker_id")
        text = settings.talker.get("text_config") or {}
        if not voices or not isinstance(voices, Mapping):
            raise ConfigError(f"model={str(folder)!r}: talker_config.speaker_id names no voices")
        names = ("tts_bos_token_id", "tts_eos_token_id", "tts_pad_token_id")
        begins, ends, pads = (
            np.append(row, np.float32(_NO_TOKEN))
            for row in settings.rows([settings.token(name) for name in names])
        )
        return cls(
            served_as,
            settings.code("num_code_groups"),
            {str(name): int(code) for name, code in voices.items()},
            begins,
            ends,
            pads,
            start=settings.token("im_start_token_id"),
            user=settings.token("user_token_id"),
            assistant=settings.token("assistant_token_id"),
            how=tuple(
                settings.code(f"codec_{name}_id") for name in ("nothink", "think_bos", "think_eos")
            ),
            pad=settings.code("codec_pad_id"),
            bos=settings.code("codec_bos_id"),
            eos=settings.code("codec_eos_token_id"),
            vocab=int(text.get("vocab_size", 0)),
            greedy=greedy,
        )

    def request(self, voice: str, states_TW: States, prompt_tokens: int, seed: int) -> Generate:
        settings: dict[str, Any] = dict(_SAMPLING)
        if self.greedy:
            settings["temperature"] = 0.0
        never = {
            code: NEVER for code in range(self.vocab - _RESERVED, self.vocab) if code != self.eos
        }
        sampling = Sampling(**settings, seed=seed, max_tokens=MAX_FRAMES, logit_bias=never)
        replaced = int(self._of_users(states_TW[:prompt_tokens]).sum()) + _ROLE
        codes = [*self.how, self.voices[voice], self.pad, self.bos]
        return Generate(
            model=self.served_as,
            prompt=[self.pad] * replaced + codes,
            sampling=sampling,
            replaced=replaced,
        )

    def states(self, voice: str, states_TW: States, prompt_tokens: int, *, ended: bool) -> States:
        prompt = states_TW[:prompt_tokens]
        answer = states_TW[self._answer(prompt) :].copy()
        answer[:, -1] = _NO_TOKEN
        end = [self.ends[None], self.pads[None]] if ended else []
        return np.concatenate(
            [
                prompt[self._of_users(prompt)],
                answer[:_ROLE],
                np.tile(self.pads, (_SILENCES, 1)),
                self.begins[None],
                answer[_ROLE:],
                *end,
            ]
        )

    def positions(self, positions_3P: Positions, states_TW: States) -> Positions:
        """Return those of the users' turns, as if nothing were between them."""
        users_P = self._of_users(states_TW[: positions_3P.shape[1]])
        turns_P = self._turns(states_TW[: positions_3P.shape[1]])
        left_out = np.zeros(len(users_P), np.int32)
        for start, stop in pairwise(np.unique(turns_P)):
            if not users_P[start]:
                left_out[stop:] += positions_3P[0, stop] - positions_3P[0, start]
        return (positions_3P - left_out)[:, users_P]

    def _turns(self, prompt_PW: States) -> NDArray[np.int64]:
        """Return for each token the index at which its turn begins."""
        begins_P = prompt_PW[:, -1] == self.start
        indices = np.where(begins_P, np.arange(len(begins_P)), 0)
        return np.maximum.accumulate(indices)

    def _of_users(self, prompt_PW: States) -> NDArray[np.bool_]:
        """Return which tokens belong to users' turns."""
        roles = np.minimum(self._turns(prompt_PW) + 1, len(prompt_PW) - 1)
        found: NDArray[np.bool_] = prompt_PW[roles, -1] == self.user
        return found

    def _answer(self, prompt_PW: States) -> int:
        """Return where the answer's turn begins. Raises BadRequest for a prompt without one."""
        ids = prompt_PW[:, -1]
        found = np.flatnonzero((ids[:-1] == self.start) & (ids[1:] == self.assistant))
        if not len(found):
            raise BadRequest("messages: the prompt does not end with a turn of the assistant")
        return int(found[-1])
