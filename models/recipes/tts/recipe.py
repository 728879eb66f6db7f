"""Define every number that decides the weights of pocket-tts."""

from __future__ import annotations

from dataclasses import dataclass, field

from recipes.speech.espeak import Voice
from recipes.training.loop import Stage

WORDS_PER_MINUTE = 165  # at rate 1


def _voices() -> dict[str, Voice]:
    return {
        "ada": Voice(name="en-us+f2", pitch=56),
        "ben": Voice(name="en-us+m3", pitch=44),
        "clara": Voice(name="en-us+f4", pitch=50),
        "david": Voice(name="en-us+m1", pitch=52),
    }


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Define voices, sentences and training stages; `PocketConfig` has the sizes."""

    seed: int = 40
    voices: dict[str, Voice] = field(default_factory=_voices)
    rates: tuple[float, float] = (0.75, 1.4)
    general_share: float = 0.65
    shard: int = 500  # sentences per file
    shards: int = 24
    codec_shards: int = 6  # files with samples, for the codec's training
    segment: int = 32  # code frames per example of the codec's batches
    codebook_sentences: int = 800  # for fitting the codebooks
    reader: Stage = Stage(steps=900, batch=64, matrix_lr=0.01, other_lr=2e-3)
    codec: Stage = Stage(steps=700, batch=12, matrix_lr=None, other_lr=2e-3)
    speaker: Stage = Stage(steps=2000, batch=32, matrix_lr=0.01, other_lr=2e-3)
