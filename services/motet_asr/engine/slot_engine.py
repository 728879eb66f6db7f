"""Schedule encoder-decoder models with continuous batching over slots.

A window takes a slot when one is free and releases it as soon as it ends. A step encodes at most
one batch of waiting windows, prefills their prompts, and then decodes one token for every row.
Family specifics (prompts, rules, end of a window) are in `SlotFamily`.
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

from .engine import Engine, Family, Waiting
from .request import Heard, Key
from .slots import Slots

Verdict = Literal["retry", "again", "done"]


@dataclass(slots=True, eq=False)
class Run:
    """State of a window between its encoding and its end.

    row: its slot.
    prompt: tokens of this pass.
    said: tokens since the prompt, without the end token.
    attempt: index of its temperature.
    seek: where this pass began, in feature frames.
    """

    waiting: Waiting
    row: int = -1
    language: str = ""
    prompt: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    logprob: float = 0.0
    attempt: int = 0
    seek: int = 0
    no_speech_prob: float = 0.0
    attention: list[Tensor] = field(default_factory=list)
    heard: Heard = field(default_factory=Heard)
    last: int = 0  # token to read next
    retry: bool = False  # prefill the prompt again, at the next temperature
    ended: bool = False
    broken: bool = False  # the model computed NaN or infinity


class SlotFamily(Family):
    """Implement an encoder-decoder model for `SlotEngine`."""

    decoder: Decoder
    eos: int

    @abstractmethod
    def encode(self, runs: Sequence[Run]) -> list[Tensor]:
        """Return the encoder states [S, E] of each run's pass."""

    @abstractmethod
    def prompt(self, run: Run) -> list[int]: ...

    @abstractmethod
    def limit(self, run: Run) -> int:
        """Return the most tokens that prompt and output may have together."""

    @abstractmethod
    def pick(self, logits_BV: Tensor, runs: Sequence[Run]) -> tuple[list[int], list[float]]: ...

    @abstractmethod
    def conclude(self, run: Run) -> Verdict:
        """Add an ended pass to `run.heard`; return whether to retry, continue or finish."""

    def undetected(self, run: Run) -> bool:
        """Return True if the language must be detected first, from the logits after `detector`."""
        return False

    detector: int = 0

    def detect(self, logits_BV: Tensor) -> list[str]:
        return []

    def observe(self, run: Run, states_TE: Tensor) -> None:
        """Read what is needed from the states [T, E] of a prompt after its prefill."""


class SlotEngine(Engine):
    """Decode runs in slots; `runs[i]` occupies row i of `slots`."""

    family: SlotFamily

    def __init__(self, config: EngineConfig, family: SlotFamily):
        super().__init__(config, family)
        self.slots: Slots = family.decoder.slots(config.max_rows)
        self.runs: list[Run] = []
        self._resumed: list[Run] = []  # runs whose window continues with another pass

    def holds(self, key: Key) -> bool:
        return super().holds(key) or any(
            run.waiting.key == key for run in (*self.runs, *self._resumed)
        )

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self.runs or self._resumed)

    def cancel(self, key: Key) -> None:
        super().cancel(key)
        self._resumed = [run for run in self._resumed if run.waiting.key != key]
        for run in self.runs[:]:
            if run.waiting.key == key:
                self._end_run(run)

    def _step(self) -> None:
        self._encode()
        while again := [run for run in self.runs if run.retry]:
            self._read_prompts(again)
        self.counts.batch_size = len(self.runs)
        if self.runs:
            self._decode()

    # -------------------------------------------------------------------------------------- joining
    def _encode(self) -> None:
        room = min(self.slots.free, self.config.encode_batch)
        runs, self._resumed = self._resumed[:room], self._resumed[room:]
        runs += [
            Run(waiting, language=waiting.options.language)
            for waiting in self._take(room - len(runs))
        ]
        if not runs:
            return
        for run, encoded_SE in zip(runs, self.family.encode(runs), strict=True):
            run.row = self.slots.add(encoded_SE.shape[0])
            self.runs.append(run)
            self.family.decoder.load_cross(self.slots, run.row, encoded_SE)
            self.counts.encoded += 1
            if not run.heard.passes:
                self.counts.audio_seconds += run.waiting.seconds
        self._detect(runs)
        self._read_prompts(runs)

    def _detect(self, runs: list[Run]) -> None:
        for group in _adjacent([run for run in runs if self.family.undetected(run)], lambda run: 1):
            states = self.family.decoder.prefill(
                self.slots, group[0].row, [[self.family.detector]] * len(group)
            )
            for run, language in zip(
                group, self.family.detect(self.family.decoder.logits(states[:, -1])), strict=True
            ):
                run.language = language

    def _read_prompts(self, runs: list[Run]) -> None:
        for run in runs:
            run.prompt, run.generated, run.logprob, run.attention = (
                self.family.prompt(run),
                [],
                0.0,
                [],
            )
            run.retry = False
        for group in _adjacent(runs, lambda run: len(run.prompt)):
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

    def _append_tokens(self, runs: Sequence[Run], logits_BV: Tensor) -> None:
        finite = Download(
            logits_BV.sum(dim=-1).isfinite()
        )  # NaN and infinity survive a sum, which costs less than checking each
        tokens, logprobs = self.family.pick(logits_BV, runs)
        self.counts.tokens += len(tokens)
        for run, token, logprob, sane in zip(
            runs, tokens, logprobs, finite.wait().tolist(), strict=True
        ):
            run.logprob += logprob
            if not sane:
                run.broken = run.ended = True
            elif token == self.family.eos:
                run.last, run.ended = token, True
            else:
                run.generated.append(token)
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
            verdict = self.family.conclude(run)
            if verdict == "retry":
                run.retry = True
                self.counts.fallbacks += 1
                continue
            self._end_run(run)
            if verdict == "again":
                self._resumed.append(run)
            else:
                self._end(run.waiting.key, run.heard)

    def _end_run(self, run: Run) -> None:
        """Free a row; the last row moves into its place."""
        self.slots.remove(run.row)
        last = self.runs.pop()
        if last is not run:
            last.row = run.row
            self.runs[run.row] = last

    # --------------------------------------------------------------------------------------- health
    def stats(self) -> dict[str, float]:
        more = {
            "running": len(self.runs),
            "slots_free": self.slots.free,
            "cache_bytes": self.slots.nbytes,
        }
        return super().stats() | more | {"waiting": len(self._waiting) + len(self._resumed)}

    def check_integrity(self) -> None:
        super().check_integrity()
        if [run.row for run in self.runs] != list(range(self.slots.rows)):
            raise InternalError(f"{len(self.runs)} windows run in {self.slots.rows} slots")
        for run in self.runs:
            if self.slots.filled[run.row] > self.slots.length:
                raise InternalError(f"slot {run.row} holds more tokens than it has room for")


def _adjacent(runs: list[Run], kind: Any) -> Iterator[list[Run]]:
    """Yield runs of the same kind in consecutive rows as groups that one call can serve."""
    ordered = sorted(runs, key=lambda run: run.row)
    keyed = [(run.row - index, kind(run), run) for index, run in enumerate(ordered)]
    for _, group in groupby(keyed, key=lambda item: item[:2]):
        yield [run for _, _, run in group]


def stacked(attention: list[Tensor]) -> Tensor | None:
    """Stack attention by token: [N, heads, S], on the CPU; None without any."""
    return torch.stack(attention).cpu() if attention else None
