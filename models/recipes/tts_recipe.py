"""Everything that decides the weights of pocket-tts."""

from __future__ import annotations

from dataclasses import dataclass, field

from speech_espeak import Voice
from training import Stage

WORDS_PER_MINUTE = 165  # the ordinary speed


def _voices() -> dict[str, Voice]:
    return {
        "ada": Voice(name="en-us+f2", pitch=56),
        "ben": Voice(name="en-us+m3", pitch=44),
        "clara": Voice(name="en-us+f4", pitch=50),
        "david": Voice(name="en-us+m1", pitch=52),
    }


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Voices, sentences and stages. Sizes are those of `PocketConfig`."""

    seed: int = 40
    voices: dict[str, Voice] = field(default_factory=_voices)
    rates: tuple[float, float] = (0.75, 1.4)
    general_share: float = 0.65
    shard: int = 500  # sentences per file
    shards: int = 24
    sounding: int = 6  # files with samples, which the codec learns from
    segment: int = 32  # code frames that the codec trains on at a time
    fitted_on: int = 800  # sentences that the codebooks are found from
    reader: Stage = Stage(steps=900, batch=64, matrix_lr=0.01, other_lr=2e-3)
    codec: Stage = Stage(steps=700, batch=12, matrix_lr=None, other_lr=2e-3)
    speaker: Stage = Stage(steps=2000, batch=32, matrix_lr=0.01, other_lr=2e-3)
