"""Schedule encoder-decoder models with continuous batching over slots.

A window takes a slot when one is free and releases it as soon as it ends. A step encodes at most
one batch of waiting windows, prefills their prompts, and then decodes one token for every row.
RecognizerFamily specifics (prompts, rules, end of a window) are in `SlotFamily`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from motet_asr.config import EngineConfig
from motet_asr.models.decoder import Decoder
from motet_kernels.runtime.device import Download
from motet_shared.errors import InternalError
from motet_shared.process.batch_isolation import computed

from .engine import Engine, RecognizerFamily, WaitingWindow, failure
from .request import Key, WindowResult
from .slots import Slots

PassOutcome = Literal["retry", "continue", "done"]


@dataclass(slots=True, eq=False)
class RunningWindow:
    """Hold the state of a window between its encoding and its end.

    row: its slot.
    prompt: tokens of this pass.
    generated: tokens since the prompt, without the end token.
    logprob: sum of their log-probabilities, and that of the end token.
    logprobs: the log-probability of each.
    attempt: index of its temperature.
    seek: where this pass began, in feature frames.
    attention: of the alignment heads, a tensor per generated token.
    last: token to read next.
    retry: prefill the prompt again, at the next temperature.
    broken: the model computed NaN or infinity.
    """

    waiting: WaitingWindow
    row: int = -1
    language: str = ""
    prompt: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    logprob: float = 0.0
    logprobs: list[float] = field(default_factory=list)
    attempt: int = 0
    seek: int = 0
    no_speech_prob: float = 0.0
    attention: list[Tensor] = field(default_factory=list)
    result: WindowResult = field(default_factory=WindowResult)
    last: int = 0
    retry: bool = False
    ended: bool = False
    broken: bool = False


class SlotFamily(RecognizerFamily):
    """Adapt an encoder-decoder model to `SlotEngine`.

    eos: the end token.
    detector: the token after whose prefill `detect` reads the language.
    """

    decoder: Decoder
    eos: int

    @abstractmethod
    def encode(self, runs: Sequence[RunningWindow]) -> list[Tensor]:
        """Return the encoder states [S, E] of each run's pass."""

    @abstractmethod
    def prompt(self, run: RunningWindow) -> list[int]:
        """Return the tokens that are prefilled before decoding."""

    @abstractmethod
    def limit(self, run: RunningWindow) -> int:
        """Return the most tokens that prompt and output may have together."""

    @abstractmethod
    def pick(
        self, logits_BV: Tensor, runs: Sequence[RunningWindow]
    ) -> tuple[list[int], list[float]]:
        """Return each row's next token and its log-probability."""

    @abstractmethod
    def conclude(self, run: RunningWindow) -> PassOutcome:
        """Append an ended pass to `run.result`; return whether to retry, continue or finish."""

    def undetected(self, run: RunningWindow) -> bool:
        """Return True if the language must be detected first, from the logits after `detector`."""
        return False

    detector: int = 0

    def detect(self, logits_BV: Tensor) -> list[str]:
        """Return the language code of each row."""
        return []

    def observe(self, run: RunningWindow, states_TE: Tensor) -> None:
        """Read what the family needs of the states [T, E] of a prompt after its prefill."""


class SlotEngine(Engine):
    """Decode runs in slots; `runs[i]` occupies row i of `slots`."""

    decoding = "encoder-decoder"
    family: SlotFamily

    def __init__(self, config: EngineConfig, family: SlotFamily):
        super().__init__(config, family)
        self.slots: Slots = family.decoder.slots(config.max_rows)
        self.runs: list[RunningWindow] = []
        self._resumed: list[RunningWindow] = []  # runs whose window continues with another pass

    def cancel(self, key: Key) -> None:
        super().cancel(key)
        self._resumed = [run for run in self._resumed if run.waiting.key != key]
        for run in self.runs[:]:
            if run.waiting.key == key:
                self._end_run(run)

    def _drop(self) -> None:
        self.runs, self._resumed = [], []
        self.slots.clear()

    def _step(self) -> None:
        self._encode()
        while retries := [run for run in self.runs if run.retry]:
            self._prefill(retries)
        self.counts.batch_size = len(self.runs)
        if self.runs:
            self._decode()

    # -------------------------------------------------------------------------------------- joining
    def _encode(self) -> None:
        room = min(self.slots.free, self.config.encode_batch)
        runs, self._resumed = self._resumed[:room], self._resumed[room:]
        runs += [
            RunningWindow(waiting, language=waiting.options.language)
            for waiting in self._take(room - len(runs))
        ]
        if not runs:
            return
        encoded: list[RunningWindow] = []
        for run, encoded_SE in zip(runs, computed(self.family.encode, runs), strict=True):
            if isinstance(encoded_SE, Exception):
                self._end(run.waiting.key, error=failure(encoded_SE))
                continue
            run.row = self.slots.add(encoded_SE.shape[0])
            self.runs.append(run)
            self.family.decoder.load_cross(self.slots, run.row, encoded_SE)
            self.counts.encoded += 1
            if not run.result.passes:
                self.counts.audio_seconds += run.waiting.seconds
            encoded.append(run)
        self._detect(encoded)
        self._prefill(encoded)

    def _detect(self, runs: list[RunningWindow]) -> None:
        for group in _groups_of_adjacent(
            [run for run in runs if self.family.undetected(run)], lambda run: 1
        ):
            states = self.family.decoder.prefill(
                self.slots, group[0].row, [[self.family.detector]] * len(group)
            )
            for run, language in zip(
                group, self.family.detect(self.family.decoder.logits(states[:, -1])), strict=True
            ):
                run.language = language

    def _prefill(self, runs: list[RunningWindow]) -> None:
        for run in runs:
            run.prompt, run.generated, run.logprob, run.attention = (
                self.family.prompt(run),
                [],
                0.0,
                [],
            )
            run.logprobs = []
            run.retry = False
        for group in _groups_of_adjacent(runs, lambda run: len(run.prompt)):
            states = self.family.decoder.prefill(
                self.slots, group[0].row, [run.prompt for run in group]
            )
            for run, states_TE in zip(group, states, strict=True):
                self.family.observe(run, states_TE)
            self._append_tokens(group, self.family.decoder.logits(states[:, -1]))
        self._remove_ended()

    # ------------------------------------------------------------------------------------- decoding
    def _decode(self) -> None:
        watch = [run.row for run in self.runs if run.waiting.options.words]
        states, attention = self.family.decoder.step(
            self.slots, [run.last for run in self.runs], watch
        )
        if attention is not None:
            for row, attention_NS in zip(watch, attention, strict=True):
                self.runs[row].attention.append(attention_NS[:, : self.slots.frames[row]])
        self._append_tokens(self.runs, self.family.decoder.logits(states))
        self._remove_ended()

    def _append_tokens(self, runs: Sequence[RunningWindow], logits_BV: Tensor) -> None:
        finite = Download(
            logits_BV.sum(dim=-1).isfinite()
        )  # NaN and infinity survive a sum, which costs less than checking each
        tokens, logprobs = self.family.pick(logits_BV, runs)
        self.counts.tokens += len(tokens)
        for run, token, logprob, is_finite in zip(
            runs, tokens, logprobs, finite.wait().tolist(), strict=True
        ):
            run.logprob += logprob
            if not is_finite:
                run.broken = run.ended = True
            elif token == self.family.eos:
                run.last, run.ended = token, True
            else:
                run.generated.append(token)
                run.logprobs.append(logprob)
                run.last = token
                run.ended = len(run.prompt) + len(run.generated) >= self.family.limit(run)

    def _remove_ended(self) -> None:
        """Conclude the runs whose pass has ended: retry, resume or report them."""
        for run in [run for run in self.runs if run.ended]:
            run.ended = False
            if run.broken:
                self.slots.scrub(run.row)
                self._end_run(run)
                where = f"after {len(run.generated)} tokens"
                self._end(
                    run.waiting.key,
                    error=InternalError(f"the model computed NaN or infinity {where}"),
                )
                continue
            outcome = self.family.conclude(run)
            if outcome == "retry":
                run.retry = True
                self.counts.fallbacks += 1
                continue
            self._end_run(run)
            if outcome == "continue":
                self._resumed.append(run)
            else:
                self._end(run.waiting.key, run.result)

    def _end_run(self, run: RunningWindow) -> None:
        """Free a row; the last row moves into its place."""
        self.slots.remove(run.row)
        last = self.runs.pop()
        if last is not run:
            last.row = run.row
            self.runs[run.row] = last

    # --------------------------------------------------------------------------------------- health
    def stats(self) -> dict[str, float]:
        slot_counts = {
            "running": len(self.runs),
            "slots_free": self.slots.free,
            "cache_bytes": self.slots.nbytes,
        }
        stats = super().stats() | slot_counts
        return stats | {"waiting": stats["waiting"] + len(self._resumed)}

    def check_integrity(self) -> None:
        super().check_integrity()
        if [run.row for run in self.runs] != list(range(self.slots.rows)):
            raise InternalError(f"{len(self.runs)} windows run in {self.slots.rows} slots")
        for run in self.runs:
            if self.slots.filled[run.row] > self.slots.length:
                raise InternalError(f"slot {run.row} holds more tokens than it has room for")


def _groups_of_adjacent(runs: list[RunningWindow], kind: Any) -> Iterator[list[RunningWindow]]:
    """Yield runs of the same kind in consecutive rows as groups that one call can serve."""
    ordered = sorted(runs, key=lambda run: run.row)
    keyed = [(run.row - index, kind(run), run) for index, run in enumerate(ordered)]
    for _, group in groupby(keyed, key=lambda item: item[:2]):
        yield [run for _, _, run in group]


def stacked(attention: list[Tensor]) -> Tensor | None:
    """Join attention by token: [N, heads, S], on the CPU; None without any."""
    return torch.stack(attention).cpu() if attention else None
