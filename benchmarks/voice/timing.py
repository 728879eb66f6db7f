"""Time recognizers in any environment, with numpy only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

from benchmarks.voice.clips import Sound

Part = Literal["features", "encoder"]
Times = dict[str, Any]


class WrongLength(RuntimeError):
    """Report a recognizer that generated another number of tokens than requested.

    expected: requested tokens of each clip. lengths: generated tokens of each clip.
    """

    def __init__(self, expected: int, lengths: list[int]) -> None:
        super().__init__(f"{lengths} tokens of the clips, not {expected} each")
        self.expected, self.lengths = expected, lengths


class Recognizer(Protocol):
    def whole(self, sounds: list[Sound], tokens: int) -> list[list[int]]:
        """Transcribe all sounds at a time, generating `tokens` tokens of each greedily."""

    def parts(self, sounds: list[Sound]) -> dict[Part, float]:
        """Return seconds of the features and of the encoder alone."""

    def describe(self) -> str: ...


def measured(
    load: Callable[[dict[str, Any]], Recognizer],
    task: dict[str, Any],
    clips: Callable[[int, float], list[Sound]],
) -> Times:
    """Run every length and number of clips of the task `repeats` times, after one uncounted run.

    load: loads the checkpoint of each length. Raises WrongLength.
    """
    runs, note = [], ""
    for checkpoint in task["checkpoints"]:
        recognizer = load({**task, **checkpoint})
        seconds, tokens, note = checkpoint["seconds"], checkpoint["tokens"], recognizer.describe()
        for batch in task["batches"]:
            sounds = clips(batch, seconds)
            whole: list[float] = []
            parts: dict[str, list[float]] = {}
            for repeat in range(task["repeats"] + 1):
                start = time.perf_counter()
                said = recognizer.whole(sounds, tokens)
                taken = time.perf_counter() - start
                split = recognizer.parts(sounds)
                lengths = [len(one) for one in said]
                if lengths != [tokens] * batch:
                    raise WrongLength(tokens, lengths)
                if repeat:
                    whole.append(taken)
                    for name, value in split.items():
                        parts.setdefault(name, []).append(value)
            runs.append(
                {"seconds": seconds, "batch": batch, "whole": whole, "parts": parts, "said": said}
            )
    return {"runs": runs, "note": note}
