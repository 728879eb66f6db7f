"""Define every number that decides the weights of pocket-asr."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.asr.tokenizer import STEP, WINDOW
from recipes.speech.noise import NORMAL, Conditions
from recipes.training.errors import RecipeError

HARD = Conditions(room=0.5, noise=0.75, telephone=0.1, clipping=0.08, snr=(1.0, 30.0))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Define the model's sizes, its training data and its optimization."""

    seed: int = 30
    width: int = 128
    heads: int = 2
    feed_forward: int = 512
    encoder_layers: int = 4
    decoder_layers: int = 2
    vocabulary: int = 1280  # text tokens
    tokenizer_sentences: int = 60_000
    max_tokens: int = 128
    general_share: float = 0.6  # of sentences; the rest are about the micro-world
    long_share: float = 0.08  # of sentences that are two joined ones
    no_speech_share: float = 0.03  # of clips without speech
    timestamp_share: float = 0.3  # of clips whose labels have timestamps
    throat_share: float = 0.0  # of clips whose throat is scaled
    throats: tuple[float, float] = (0.86, 1.16)  # scale of formants and pitch
    conditions: Conditions = NORMAL  # of the recording
    full_window_share: float = (
        0.08  # of batches padded to the whole window, as in most uses of the model
    )
    shard: int = 512  # clips per file
    group: int = 32  # shards that are shuffled together
    passes: int = 4  # visits of each clip, each in another batch
    batch: int = 16
    matrix_lr: float = 0.01
    other_lr: float = 2e-3
    warmup: int = 200
    decay: float = 0.3
    phoneme_weight: float = 0.4  # of the phoneme loss
    alignment_weight: float = 0.15  # of the alignment loss
    restarts: tuple[tuple[int, float], ...] = ((9_200, 0.7), (17_000, 0.7))

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise RecipeError(
                f"width={self.width} is not a multiple of heads={self.heads}: change one of them",
                param="width",
            )
        if self.shard % self.batch:
            raise RecipeError(
                f"shard={self.shard} is not a multiple of batch={self.batch}: change one of them",
                param="shard",
            )

    @property
    def positions(self) -> int:
        """Return the encoder positions of a whole window."""
        return round(WINDOW / STEP)

    @property
    def alignment_heads(self) -> tuple[tuple[int, int], ...]:
        """Return (layer, head) of the cross-attention heads that the alignment loss trains."""
        return tuple((layer, 0) for layer in range(self.decoder_layers))


@dataclass(frozen=True, kw_only=True)
class FurtherRecipe(Recipe):
    """Define a run that goes on from a checkpoint: rates that fall from its start, harder clips."""

    general_share: float = 0.7
    throat_share: float = 0.5
    conditions: Conditions = HARD
    batch: int = 32
    decay: float = 0.9
    restarts: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PoolRecipe(Recipe):
    """Define a timed run from a pool of speech, in conditions drawn anew at each visit of a clip."""

    shard: int = 256
    batch: int = 128
    matrix_lr: float = 0.012
    other_lr: float = 2e-3
    steps: int = 12_000  # of the schedule, which is stretched over the run's time
    warmup: int = 300
    decay: float = 0.5  # share of the time in which the rates fall
    restarts: tuple[tuple[int, float], ...] = ()
    timestamp_share: float = 0.2
    full_window_share: float = 0.04
    pool_samples: int = 6_000_000_000  # two bytes each, on the device
    pool_clips: int = 160_000
    first_clips: int = 1_024  # clips before the first step
    chunk: int = 8  # batches whose clips are drawn together and sorted by length
    throat_share: float = 0.7
    conditions: Conditions = HARD
