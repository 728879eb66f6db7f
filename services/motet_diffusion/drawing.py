"""What the engine is asked for, one picture at a time, and what it tells while the picture forms."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from PIL.Image import Image
from torch import Tensor

from motet_shared.errors import MotetError

Key = Hashable


class Lora(NamedTuple):
    """An adapter that takes part in a picture, and how strongly."""

    name: str
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One picture to be drawn. Zeros and Nones are the model's defaults; `Rules.settled` puts them in.

    image: RGB, what is changed; mask: L, white where. strength: how far from the image, above 0 to 1.
    previews: how many estimates are told, the first after a fifth of the steps. checkpoint_every: steps; 0: none.
    loras: adapters of the model that take part.
    resume: a checkpoint (see `checkpoint`), and resume_step the steps that it has behind it.
    """

    prompt: str
    negative_prompt: str = ""
    width: int = 0
    height: int = 0
    steps: int = 0
    guidance_scale: float | None = None
    seed: int = 0
    image: Image | None = None
    mask: Image | None = None
    strength: float | None = None
    previews: int = 0
    checkpoint_every: int = 0
    loras: tuple[Lora, ...] = ()
    resume: bytes = b""
    resume_step: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """A step is done.

    estimate: what the finished latents would be as far as one can tell now, `[1, channels, height, width]` in the
    scale of the VAE; where it is wanted. checkpoint: safetensors, where it is wanted.
    """

    key: Key
    step: int  # from 1
    steps: int
    estimate: Tensor | None = None
    checkpoint: bytes = b""


@dataclass(frozen=True, slots=True)
class Done:
    """The picture, or why there is none."""

    key: Key
    picture: Image | None = None
    steps: int = 0
    error: MotetError | None = None


Event = Step | Done
