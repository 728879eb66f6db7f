"""Define a speech model's input, one sentence, and its outputs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from motet_shared.errors import MotetError
from motet_shared.messages import Generate

Key = Hashable


@dataclass(frozen=True, eq=False)
class VoiceSample:
    """Hold a recording whose voice a sentence is to have.

    samples: float32 `[N]`, one channel at `rate` Hz.
    words: what is said in it.
    """

    samples: Tensor
    rate: int
    words: str


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """Represent one sentence to be spoken.

    words: as they are pronounced ("twenty-one", not "21"), in order; a model reads them joined with
        spaces.
    voice: one of the model's voices.
    sample: a recording whose voice is used instead, if the model clones voices.
    instructions: how it is spoken, if the model follows instructions.
    seed, index: noise is keyed by both and by the frame, so a sentence sounds the same on any
        instance and in any batch.
    speed: within the `rates` of the model.
    max_frames: most frames of the model; 0: as many as such a text may need.
    priority: while it waits, those of a higher one come first.
    """

    words: tuple[str, ...]
    voice: str
    seed: int = 0
    index: int = 0
    speed: float = 1.0
    max_frames: int = 0
    sample: VoiceSample | None = field(default=None, compare=False)
    instructions: str = ""
    priority: int = 0

    @property
    def text(self) -> str:
        """Return the words joined with spaces."""
        return " ".join(self.words)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Report one engine step of one utterance.

    samples: the next ones, float32 `[N]` at the model's rate, in -1 to 1; N may be 0.
    starts: the samples of the utterance at which its words begin, as far as they have begun; None:
        nothing new, or the model does not report them.
    done: the utterance is complete.
    tokens, frames: of the prompt and of the speech so far.
    error: why the utterance ends without being complete.
    generate: the tokens that the sentence needs from decode; `Engine.feed` takes them.
    """

    key: Key
    samples: Tensor | None = None
    starts: tuple[int, ...] | None = None
    done: bool = False
    tokens: int = 0
    frames: int = 0
    error: MotetError | None = None
    generate: Generate | None = None
