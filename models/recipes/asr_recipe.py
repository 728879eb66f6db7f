"""Everything that decides the weights of pocket-asr."""

from __future__ import annotations

from dataclasses import dataclass

from asr_tokenizer import STEP, WINDOW


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes of the model, what it hears and how it learns."""

    seed: int = 30
    width: int = 128
    heads: int = 2
    feed_forward: int = 512
    encoder_layers: int = 4
    decoder_layers: int = 2
    vocabulary: int = 1280  # text tokens
    tokenizer_sentences: int = 60_000
    max_tokens: int = 128
    general_share: float = 0.6  # of the sentences; the others are of the micro-world
    long_share: float = 0.08  # of the sentences: two in one breath
    silent_share: float = 0.03  # of the clips: nobody speaks
    timestamp_share: float = 0.3  # of the clips: the text stands between timestamps
    whole_share: float = (
        0.08  # of the batches: padded to the whole window, as most users of the model do
    )
    shard: int = 512  # clips per file
    group: int = 32  # shards that are gone through together
    passes: int = 4  # how often each clip is heard, every time in another company
    batch: int = 16
    matrix_lr: float = 0.01
    other_lr: float = 2e-3
    warmup: int = 200
    decay: float = 0.3
    phoneme_weight: float = 0.4  # of the encoder's loss on what phoneme is spoken when
    alignment_weight: float = 0.15  # of the loss on where the alignment heads look
    restarts: tuple[tuple[int, float], ...] = ((9_200, 0.7), (17_000, 0.7))

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of heads {self.heads}: change one of them"
            )
        if self.shard % self.batch:
            raise ValueError(
                f"shard {self.shard} is not a multiple of batch {self.batch}: change one of them"
            )

    @property
    def positions(self) -> int:
        """Encoder positions in a whole window."""
        return round(WINDOW / STEP)

    @property
    def alignment_heads(self) -> tuple[tuple[int, int], ...]:
        """(layer, head) of the cross-attention heads that are taught to look at the word they write."""
        return tuple((layer, 0) for layer in range(self.decoder_layers))
