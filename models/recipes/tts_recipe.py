"""Everything that decides the weights of pocket-tts."""

from __future__ import annotations

from dataclasses import dataclass, field

from speech_espeak import Voice

WORDS_PER_MINUTE = 165  # the ordinary speed


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One of the three trainings: its length, batch and learning rates."""

    steps: int
    batch: int
    matrix_lr: float
    other_lr: float
    warmup: int = 100
    decay: float = 0.4


def _voices() -> dict[str, Voice]:
    return {
        "ada": Voice(name="en-us+f2", pitch=56),
        "ben": Voice(name="en-us+m3", pitch=44),
        "clara": Voice(name="en+f4", pitch=50),
        "david": Voice(name="en+m1", pitch=52),
        "ella": Voice(name="en-us+Annie", pitch=50),
        "finn": Voice(name="en-gb-scotland+m7", pitch=52),
    }


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Voices, sentences and stages. Sizes are those of `PocketConfig`."""

    seed: int = 40
    voices: dict[str, Voice] = field(default_factory=_voices)
    rates: tuple[float, float] = (0.75, 1.4)
    general_share: float = 0.65
    inventory_sentences: int = 2000  # that are spoken to learn which phonemes there are
    segment: int = 32  # code frames that the codec trains on at a time
    settle: int = 300  # steps of the codec before its latents are quantized
    reader: Stage = Stage(steps=6000, batch=48, matrix_lr=0.01, other_lr=2e-3)
    codec: Stage = Stage(steps=6000, batch=8, matrix_lr=0.005, other_lr=1e-3)
    speaker: Stage = Stage(steps=12_000, batch=16, matrix_lr=0.01, other_lr=2e-3)
    advance_weight: float = 1.0  # of the loss on the pointer, beside the sum over the codebooks
