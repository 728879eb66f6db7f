"""How every recognizer is timed, in whichever environment it runs: needs numpy only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

from voice_clips import Sound

Part = Literal["features", "encoder"]
Times = dict[str, Any]


class Recognizer(Protocol):
    def whole(self, sounds: list[Sound], tokens: int) -> list[list[int]]:
        """Hear all sounds at a time, and say so many tokens of each, greedily, whatever comes."""

    def parts(self, sounds: list[Sound]) -> dict[Part, float]:
        """Seconds of the features and of the encoder alone."""

    def describe(self) -> str: ...


def measured(
    load: Callable[[dict[str, Any]], Recognizer],
    task: dict[str, Any],
    clips: Callable[[int, float], list[Sound]],
) -> Times:
    """Every length and every number of clips of the task, `repeats` times each after one that is not counted.

    Clips of each length are heard by a checkpoint of their own, which says so many tokens.
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
                    raise RuntimeError(
                        f"{tokens} tokens were to be said of each of {batch} clips, not {lengths}"
                    )
                if repeat:
                    whole.append(taken)
                    for name, value in split.items():
                        parts.setdefault(name, []).append(value)
            runs.append(
                {"seconds": seconds, "batch": batch, "whole": whole, "parts": parts, "said": said}
            )
    return {"runs": runs, "note": note}
