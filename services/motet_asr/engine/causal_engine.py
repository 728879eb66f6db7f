"""Schedule decoder-only models with continuous batching: audio and text are positions of one sequence.

A window is a prompt that is prefilled, and tokens that are decoded one by one, all windows
together. Where each token belongs to a frame of audio, the frame is added to the token that is
read, and decoding ends with the frames; a chunk of a live stream is then a window whose sequence
outlives it.

B windows · P positions of a prompt · N frames · E model size · V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from motet_asr.config import EngineConfig
from motet_kernels.runtime.device import Download
from motet_kernels.spans import upload
from motet_shared.errors import InternalError
from motet_shared.process.batch_isolation import computed

from .audio_stream import StreamChunk
from .engine import Engine, RecognizerFamily, WaitingWindow, failure
from .key_values import KeyValues
from .request import Key, Pass, WindowResult


@dataclass(slots=True, eq=False)
class CausalState:
    """Hold what decoding carries from token to token, and from chunk to chunk of a stream.

    last: the token that is read next.
    ended: the model has written its end token; it writes nothing any more.
    condition: what a family adds to each position, such as the delay of its text, [E].
    """

    sequence: KeyValues
    last: int = 0
    ended: bool = False
    condition: Tensor | None = None


@dataclass(slots=True, eq=False)
class RunningSequence:
    """Hold a window between its encoding and its end.

    prompt_PE: embeddings to prefill; of no positions where a chunk goes on.
    frames_NE: what is added to the tokens that are read after the prompt; None: nothing.
    limit: most tokens of this window.
    language: code that the request named, or empty.
    """

    waiting: WaitingWindow
    state: CausalState
    prompt_PE: Tensor
    frames_NE: Tensor | None
    limit: int
    language: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logprob: float = 0.0
    broken: bool = False

    @property
    def ended(self) -> bool:
        """Return True if nothing is left to decode."""
        return self.state.ended or self.broken or len(self.tokens) >= self.limit


class CausalFamily(RecognizerFamily):
    """Adapt a decoder-only model to `CausalEngine`.

    eos: the end tokens.
    """

    eos: frozenset[int]

    @abstractmethod
    def begin(self, windows: Sequence[WaitingWindow]) -> list[RunningSequence]:
        """Encode windows that are next."""

    @abstractmethod
    def embed(self, tokens_B: Tensor) -> Tensor:
        """Return the embeddings [B, E] of text tokens."""

    @abstractmethod
    def forward(self, x_BTE: Tensor, states: Sequence[CausalState]) -> Tensor:
        """Append positions to the sequences; return the float32 logits [B, V] after the last."""

    def frames_of(self, run: RunningSequence) -> int:
        """Return the frames of audio that a window covers."""
        return 0 if run.frames_NE is None else len(run.frames_NE)

    def language_of(self, tokens: Sequence[int]) -> str:
        """Return the code of the language that the tokens name; empty if they name none."""
        return ""


class CausalEngine(Engine):
    """Decode all running windows together, token by token."""

    decoding = "decoder-only"
    family: CausalFamily

    def __init__(self, config: EngineConfig, family: CausalFamily):
        super().__init__(config, family)
        self.runs: list[RunningSequence] = []

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
        runs = list(self._begin(taken))
        self.runs += runs
        self.counts.encoded += len(runs)
        self.counts.audio_seconds += sum(run.waiting.seconds for run in runs)
        for run in runs:
            if len(run.prompt_PE):
                self._append([run], self.family.forward(run.prompt_PE[None], [run.state]))

    def _begin(self, taken: list[WaitingWindow]) -> Iterator[RunningSequence]:
        """Yield the sequences of windows that can be encoded; a chunk changes its stream's state, once."""
        whole = [window for window in taken if not isinstance(window.features, StreamChunk)]
        chunks = [[window] for window in taken if isinstance(window.features, StreamChunk)]
        for batch in (whole, *chunks):
            for window, run in zip(batch, computed(self.family.begin, batch), strict=True):
                if isinstance(run, Exception):
                    self._end(window.key, error=failure(run))
                else:
                    yield run

    def _decode(self, runs: list[RunningSequence]) -> None:
        ids_B = upload(torch.tensor([run.state.last for run in runs]), self.family.device)
        x_BE = self.family.embed(ids_B)
        if (frames := [_frame(run) for run in runs])[0] is not None:
            x_BE = x_BE + torch.stack([frame for frame in frames if frame is not None])
        self._append(runs, self.family.forward(x_BE[:, None], [run.state for run in runs]))

    def _append(self, runs: Sequence[RunningSequence], logits_BV: Tensor) -> None:
        finite = Download(logits_BV.sum(dim=-1).isfinite())
        values_B, tokens_B = logits_BV.log_softmax(dim=-1).max(dim=-1)
        values, tokens = Download(values_B), Download(tokens_B)
        self.counts.tokens += len(runs)
        for run, token, logprob, is_finite in zip(
            runs,
            tokens.wait().tolist(),
            values.wait().tolist(),
            finite.wait().tolist(),
            strict=True,
        ):
            run.state.last = token
            run.logprob += logprob
            if not is_finite:
                run.broken = True
            elif token in self.family.eos:
                run.state.ended = True
            else:
                run.tokens.append(token)
                run.logprobs.append(logprob)

    def _remove_ended(self) -> None:
        for run in [run for run in self.runs if run.ended]:
            self.runs.remove(run)
            if run.broken:
                where = f"after {len(run.tokens)} tokens"
                error = InternalError(f"the model computed NaN or infinity {where}")
                self._end(run.waiting.key, error=error)
                continue
            count = len(run.tokens) + run.state.ended
            result = Pass(
                run.tokens,
                frames=self.family.frames_of(run),
                avg_logprob=run.logprob / max(count, 1),
                logprobs=run.logprobs,
            )
            language = run.language or self.family.language_of(run.tokens)
            self._end(run.waiting.key, WindowResult([result], language))

    def stats(self) -> dict[str, float]:
        held = sum(run.state.sequence.nbytes for run in self.runs)
        return super().stats() | {"running": len(self.runs), "cache_bytes": held}

    def check_integrity(self) -> None:
        super().check_integrity()
        keys: list[Any] = [run.waiting.key for run in self.runs]
        if len(set(keys)) != len(keys) or len(keys) > self.config.max_rows:
            raise InternalError(f"{len(keys)} windows run, {len(set(keys))} of them different")


def _frame(run: RunningSequence) -> Tensor | None:
    """Return the frame [E] that is added to the next token."""
    if run.frames_NE is None:
        return None
    at = len(run.tokens) - (1 if len(run.prompt_PE) else 0)
    return run.frames_NE[at]
