"""Schedule transducers (RNN-T and TDT) with continuous batching of their decoding.

A step encodes at most one batch of waiting windows, then takes every running window past its next
token or past `LOOKAHEAD` frames without one, whichever comes first. A chunk of a live stream is a
window whose decoding state outlives it.

B rows · N encoder frames · F frames looked at · V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from motet_asr.config import EngineConfig
from motet_shared.errors import InternalError

from .engine import Engine, RecognizerFamily, WaitingWindow
from .request import Key, Pass, WindowResult

LOOKAHEAD = 8  # frames of a row whose logits are computed together, as if they were all blank


@dataclass(slots=True, eq=False)
class TransducerState:
    """Hold what decoding carries from frame to frame, and from chunk to chunk of a stream.

    output, hidden, cell: of the prediction network, [E], [layers, E] and [layers, E]; None before
        the start token was read.
    symbols: tokens at the current frame.
    skip: frames of the next chunk that a token's duration reaches over.
    """

    output: Tensor | None = None
    hidden: Tensor | None = None
    cell: Tensor | None = None
    symbols: int = 0
    skip: int = 0


@dataclass(slots=True, eq=False)
class RunningTransducer:
    """Hold a window between its encoding and its end.

    frames_NE: projected encoder frames.
    index: the current frame.
    decisions: tokens and blanks so far; at most `limit`.
    """

    waiting: WaitingWindow
    state: TransducerState
    frames_NE: Tensor
    index: int
    limit: int
    decisions: int = 0
    tokens: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Return True if all frames were read, or more decided than any speech needs."""
        return self.index >= len(self.frames_NE) or self.decisions >= self.limit


class TransducerFamily(RecognizerFamily):
    """Adapt a transducer to `TransducerEngine`.

    blank, start: the blank token, and the one that is read first.
    durations: in frames, by index of the joint network's outputs after its tokens; empty: RNN-T,
        whose tokens take none and whose blanks take one.
    max_symbols: most tokens at one frame of an RNN-T; with the number of frames, it bounds the
        decisions of any transducer.
    """

    blank: int
    start: int
    durations: tuple[int, ...] = ()
    max_symbols: int

    @abstractmethod
    def encode(self, windows: Sequence[WaitingWindow]) -> list[tuple[Tensor, TransducerState, int]]:
        """Return frames [N, E] of each window, the state to go on from and the most decisions."""

    @abstractmethod
    def predict(self, tokens: list[int], states: Sequence[TransducerState]) -> None:
        """Read a token in each state's prediction network."""

    @abstractmethod
    def join(self, frames_BFE: Tensor, outputs_BE: Tensor) -> Tensor:
        """Return the joint network's float32 logits [B, F, V + durations]."""

    def language_of(self, tokens: Sequence[int]) -> str:
        """Return the code of the language that the tokens name; empty if they name none."""
        return ""


class TransducerEngine(Engine):
    """Decode all running windows together, token by token."""

    decoding = "transducer"
    family: TransducerFamily

    def __init__(self, config: EngineConfig, family: TransducerFamily):
        super().__init__(config, family)
        self.runs: list[RunningTransducer] = []

    def cancel(self, key: Key) -> None:
        super().cancel(key)
        self.runs = [run for run in self.runs if run.waiting.key != key]

    def _drop(self) -> None:
        self.runs = []

    def _step(self) -> None:
        self._encode()
        self.counts.batch_size = len(self.runs)
        if active := [run for run in self.runs if not run.ended]:
            self._decode(active)
        self._remove_ended()

    def _encode(self) -> None:
        taken = self._take(self.config.max_rows - len(self.runs))
        if not taken:
            return
        encoded = self.family.encode(taken)
        runs = [
            RunningTransducer(waiting, state, frames_NE, state.skip, limit)
            for waiting, (frames_NE, state, limit) in zip(taken, encoded, strict=True)
        ]
        if fresh := [run.state for run in runs if run.state.output is None]:
            self.family.predict([self.family.start] * len(fresh), fresh)
        self.runs += runs
        self.counts.encoded += len(runs)
        self.counts.audio_seconds += sum(run.waiting.seconds for run in runs)

    def _decode(self, runs: list[RunningTransducer]) -> None:
        """Take each run past its next token, or past the frames that were looked at."""
        width = min(LOOKAHEAD, max(len(run.frames_NE) - run.index for run in runs))
        frames_BFE = torch.stack([_ahead(run, width) for run in runs])
        outputs_BE = torch.stack([_output(run.state) for run in runs])
        logits = self.family.join(frames_BFE, outputs_BE)
        count = self.family.vocab
        finite_B = logits.sum(dim=(1, 2)).isfinite().tolist()
        values, tokens = logits[..., :count].log_softmax(dim=-1).max(dim=-1)
        tokens_BF, values_BF = tokens.tolist(), values.tolist()
        steps_BF = logits[..., count:].argmax(dim=-1).tolist() if self.family.durations else None
        read: list[RunningTransducer] = []
        for row, run in enumerate(runs):
            if not finite_B[row]:
                self._fail(run)
            elif self._walk(run, tokens_BF[row], values_BF[row], steps_BF and steps_BF[row]):
                read.append(run)
        if read:
            self.family.predict([run.tokens[-1] for run in read], [run.state for run in read])
            self.counts.tokens += len(read)

    def _walk(
        self,
        run: RunningTransducer,
        tokens_F: list[int],
        logprobs_F: list[float],
        steps_F: list[int] | None,
    ) -> bool:
        """Go over blanks up to the next token; return False if no token was found."""
        first = run.index
        while not run.ended and (at := run.index - first) < len(tokens_F):
            token, run.decisions = tokens_F[at], run.decisions + 1
            if steps_F is not None:
                step = self.family.durations[steps_F[at]]
                step = max(step, 1) if token == self.family.blank else step
                end = run.index + step
            else:
                step, end = self._step_of(run.state, token), run.index + 1
            if token != self.family.blank:
                run.tokens.append(token)
                run.starts.append(run.index)
                run.ends.append(end)
                run.logprobs.append(logprobs_F[at])
            run.index += step
            if token != self.family.blank:
                return True
        return False

    def _step_of(self, state: TransducerState, token: int) -> int:
        """Return the frames that an RNN-T goes on by: one at a blank or after too many tokens."""
        state.symbols = 0 if token == self.family.blank else state.symbols + 1
        if token == self.family.blank or state.symbols >= self.family.max_symbols:
            state.symbols = 0
            return 1
        return 0

    def _fail(self, run: RunningTransducer) -> None:
        self.runs.remove(run)
        where = f"after {len(run.tokens)} tokens"
        self._end(
            run.waiting.key, error=InternalError(f"the model computed NaN or infinity {where}")
        )

    def _remove_ended(self) -> None:
        for run in [run for run in self.runs if run.ended]:
            self.runs.remove(run)
            run.state.skip = max(run.index - len(run.frames_NE), 0)
            mean = sum(run.logprobs) / max(len(run.logprobs), 1)
            result = Pass(
                run.tokens,
                frames=len(run.frames_NE),
                avg_logprob=mean,
                logprobs=run.logprobs,
                spans=list(zip(run.starts, run.ends, strict=True)),
            )
            self._end(run.waiting.key, WindowResult([result], self._language(run)))

    def _language(self, run: RunningTransducer) -> str:
        """Return the language that was asked for, or else the one that the model named."""
        asked = run.waiting.options.language if self.family.languages else ""
        return asked or self.family.language_of(run.tokens)

    def stats(self) -> dict[str, float]:
        return super().stats() | {"running": len(self.runs)}

    def check_integrity(self) -> None:
        super().check_integrity()
        keys: list[Any] = [run.waiting.key for run in self.runs]
        if len(set(keys)) != len(keys) or len(keys) > self.config.max_rows:
            raise InternalError(f"{len(keys)} windows run, {len(set(keys))} of them different")


def _ahead(run: RunningTransducer, width: int) -> Tensor:
    """Return the next `width` frames; the last one is repeated where there are fewer."""
    ahead = run.frames_NE[run.index : run.index + width]
    missing = width - len(ahead)
    return torch.cat([ahead, ahead[-1:].expand(missing, -1)]) if missing else ahead


def _output(state: TransducerState) -> Tensor:
    if state.output is None:
        raise InternalError("a transducer decodes before its start token was read")
    return state.output
