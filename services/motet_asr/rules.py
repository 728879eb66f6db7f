"""Which tokens Whisper may say next, and which it says: the rules of its reference decoder.

B rows · V vocabulary. Source: "Robust Speech Recognition via Large-Scale Weak Supervision" (Radford et al., 2022) and
its reference implementation; checked against transformers' processors.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class State:
    """What the rules must know of a row: the tokens said so far, and whether it says timestamps."""

    said: list[int]
    timestamps: bool
    temperature: float = 0.0
    noise: int = 0  # seed of the next token's noise


class WhisperRules:
    """Reads a checkpoint's generation_config. Without `no_timestamps_token_id` there are no timestamps."""

    def __init__(self, generation: Any, vocab: int):
        eos = generation.eos_token_id
        self.eos: int = eos[0] if isinstance(eos, list) else eos
        no_timestamps = getattr(generation, "no_timestamps_token_id", None)
        self.no_timestamps: int | None = no_timestamps
        self.first_time: int = vocab if no_timestamps is None else no_timestamps + 1
        self._last_initial: int | None = getattr(generation, "max_initial_timestamp_index", None)
        self._never = _listed(getattr(generation, "suppress_tokens", None), vocab)
        self._not_first = _listed(getattr(generation, "begin_suppress_tokens", None), vocab)

    @property
    def has_timestamps(self) -> bool:
        return self.no_timestamps is not None

    def pick(self, logits_BV: Tensor, states: Sequence[State]) -> tuple[list[int], list[float]]:
        """The next token of each row and its log-probability under the rules. Changes `logits_BV`."""
        logits_BV[:, self._never] = _NEVER
        timed = [row for row, state in enumerate(states) if state.timestamps]
        for row, state in enumerate(states):
            if not state.said:
                logits_BV[row, self._not_first] = _NEVER
            if state.timestamps:
                self._pair(logits_BV[row], state.said)
        if timed:
            self._prefer_timestamps(logits_BV, timed)
        logprobs_BV = logits_BV.log_softmax(dim=-1)
        tokens_B = logits_BV.argmax(dim=-1)
        for row, state in enumerate(states):
            if state.temperature > 0:
                tokens_B[row] = _drawn(logits_BV[row], state)
        return tokens_B.tolist(), logprobs_BV.gather(1, tokens_B[:, None])[:, 0].tolist()

    def _pair(self, logits_V: Tensor, said: list[int]) -> None:
        """Timestamps come in pairs, except before the end, and never go back."""
        begin = self.first_time
        logits_V[self.no_timestamps] = _NEVER
        if not said:
            logits_V[:begin] = _NEVER
            if self._last_initial is not None:
                logits_V[begin + self._last_initial + 1 :] = _NEVER
            return
        was_time = said[-1] >= begin
        before_was_time = len(said) < 2 or said[-2] >= begin
        if was_time and before_was_time:
            logits_V[begin:] = _NEVER
        elif was_time:
            logits_V[: self.eos] = _NEVER
        last = next((token for token in reversed(said) if token >= begin), None)
        if last is not None:
            least = last if was_time and not before_was_time else last + 1
            logits_V[begin:least] = _NEVER

    def _prefer_timestamps(self, logits_BV: Tensor, rows: list[int]) -> None:
        """Where all timestamps together are likelier than any one text token, a timestamp it is."""
        begin = self.first_time
        logprobs = logits_BV[rows].log_softmax(dim=-1)
        wins = logprobs[:, begin:].logsumexp(dim=-1) > logprobs[:, :begin].max(dim=-1).values
        for row, win in zip(rows, wins.tolist(), strict=True):
            if win:
                logits_BV[row, :begin] = _NEVER


def _listed(tokens: Sequence[int] | None, vocab: int) -> Tensor:
    return torch.tensor([token for token in tokens or () if 0 <= token < vocab], dtype=torch.long)


def _drawn(logits_V: Tensor, state: State) -> Tensor:
    """A token drawn at the row's temperature, with noise of its own: the same in any batch."""
    generator = torch.Generator().manual_seed(state.noise)
    return torch.multinomial((logits_V / state.temperature).softmax(dim=-1), 1, generator=generator)[0]


def repetition(tokens: Sequence[int], vocab: int) -> float:
    """How many times smaller zlib makes the token ids: above about 1.35 a text goes round in circles."""
    width = (vocab.bit_length() - 1) // 8 + 1
    data = b"".join(token.to_bytes(width, "little") for token in tokens)
    return len(data) / len(zlib.compress(data))


def text_compression(text: str) -> float:
    """The same of a text's bytes, as OpenAI reports it: above 2.4 it failed."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0
