"""Apply Whisper's token rules: which tokens may follow, and which one is picked.

B rows · V vocabulary. Source: "Robust SpeechMarker Recognition via Large-Scale Weak Supervision" (Radford
et al., 2022) and its reference implementation; checked against transformers' processors.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from motet_kernels.runtime.device import Download

from .token_suppression import token_suppression


@dataclass(frozen=True, slots=True)
class RowState:
    """Hold the state of a row that the rules read.

    generated: tokens so far.
    timestamps: whether the row predicts timestamps.
    noise: seed of the next token's noise.
    """

    generated: list[int]
    timestamps: bool
    temperature: float = 0.0
    noise: int = 0


class WhisperRules:
    """Pick tokens by the rules of a checkpoint's generation_config.

    Without `no_timestamps_token_id` there are no timestamps. `device`: where logits are.
    """

    def __init__(self, generation: Any, vocab: int, device: torch.device):
        eos = generation.eos_token_id
        self.eos: int = eos[0] if isinstance(eos, list) else eos
        no_timestamps = getattr(generation, "no_timestamps_token_id", None)
        self.no_timestamps: int | None = no_timestamps
        self.first_time: int = vocab if no_timestamps is None else no_timestamps + 1
        self._last_initial: int | None = getattr(generation, "max_initial_timestamp_index", None)
        self._vocab = vocab
        suppressed = getattr(generation, "suppress_tokens", None) or ()
        begin_suppressed = getattr(generation, "begin_suppress_tokens", None) or ()
        self._suppression = token_suppression(
            suppressed, begin_suppressed, self.first_time, vocab, device
        )

    @property
    def has_timestamps(self) -> bool:
        """Return True if the model can predict timestamps."""
        return self.no_timestamps is not None

    def pick(self, logits_BV: Tensor, states: Sequence[RowState]) -> tuple[list[int], list[float]]:
        """Pick each row's next token; return tokens and log-probabilities.

        Masks `logits_BV` in place.
        """
        begins = [not state.generated for state in states]
        ranges = [
            self._suppressed_ranges(state.generated) if state.timestamps else [] for state in states
        ]
        self._suppression.write(logits_BV, begins, [state.timestamps for state in states], ranges)
        logprobs_BV = logits_BV.log_softmax(dim=-1)
        tokens_B = logits_BV.argmax(dim=-1)
        for row, state in enumerate(states):
            if state.temperature > 0:
                tokens_B[row] = _sample(logits_BV[row].cpu(), state)
        tokens, logprobs = (
            Download(tokens_B),
            Download(logprobs_BV.gather(1, tokens_B[:, None])[:, 0]),
        )
        return tokens.wait().tolist(), logprobs.wait().tolist()

    def _suppressed_ranges(self, generated: list[int]) -> list[tuple[int, int]]:
        """Return the token ranges that the timestamp rules suppress next.

        Timestamps come in pairs, except before the end, and never decrease.
        """
        if self.no_timestamps is None:
            return []
        begin = self.first_time
        suppressed = [(self.no_timestamps, self.no_timestamps + 1)]
        if not generated:
            suppressed.append((0, begin))
            if self._last_initial is not None:
                suppressed.append((begin + self._last_initial + 1, self._vocab))
            return suppressed
        is_time = generated[-1] >= begin
        previous_is_time = len(generated) < 2 or generated[-2] >= begin
        if is_time and previous_is_time:
            suppressed.append((begin, self._vocab))
        elif is_time:
            suppressed.append((0, self.eos))
        last = next((token for token in reversed(generated) if token >= begin), None)
        if last is not None:
            suppressed.append((begin, last if is_time and not previous_is_time else last + 1))
        return suppressed


def _sample(logits_V: Tensor, state: RowState) -> Tensor:
    """Sample a token at the row's temperature with the row's own seed, independent of the batch."""
    generator = torch.Generator().manual_seed(state.noise)
    return torch.multinomial(
        (logits_V / state.temperature).softmax(dim=-1), 1, generator=generator
    )[0]


def compression_of_tokens(tokens: Sequence[int], vocab: int) -> float:
    """Return the zlib compression ratio of the token ids; above about 1.35 a text is repetitive."""
    width = (vocab.bit_length() - 1) // 8 + 1
    data = b"".join(token.to_bytes(width, "little") for token in tokens)
    return len(data) / len(zlib.compress(data))


def text_compression(text: str) -> float:
    """Return the zlib ratio of a text's bytes, as OpenAI reports it; above 2.4 decoding failed."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0
