"""Define the engine's requests, one picture or video each, and the events that it emits."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from motet_shared.errors import MotetError

Key = Hashable


class Lora(NamedTuple):
    """Name an adapter that takes part in a picture, and its scale."""

    name: str
    scale: float = 1.0


class Control(NamedTuple):
    """Name a ControlNet that steers a picture, and the image that it follows.

    image: RGB; None while it is not here yet. start, end: the part of the steps in which it does.
    """

    name: str
    image: Image | None = None
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0


class ImagePrompt(NamedTuple):
    """Name an IP-Adapter, and the image that it reads as a prompt. image: as that of `Control`."""

    name: str
    image: Image | None = None
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PictureRequest:
    """Request for one picture, or for one video of a model that makes these.

    Zeros and Nones stand for the model's defaults; `Rules.completed` fills them.

    image: RGB, the picture to change; mask: L, white where it changes. strength: how far from the
    image, above 0 and at most 1. previews: number of estimates, the first after a fifth of the
    steps. checkpoint_every: steps; 0: none. seconds, frames: length of a video. scheduler: name;
    "": the model's own. loras, controls, image_prompts: adapters and ControlNets of the model that
    take part. resume: a checkpoint (see
    `checkpoint`); resume_step: the steps done in it.
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
    seconds: float = 0.0
    frames: int = 0
    previews: int = 0
    checkpoint_every: int = 0
    scheduler: str = ""
    loras: tuple[Lora, ...] = ()
    controls: tuple[Control, ...] = ()
    image_prompts: tuple[ImagePrompt, ...] = ()
    resume: bytes = b""
    resume_step: int = 0


@dataclass(frozen=True, slots=True)
class StepDone:
    """Report that a step is done.

    estimate: the expected finished latents, `[1, channels, height, width]` in the scale of the VAE,
        where a preview is due.
    checkpoint: safetensors, where one is due.
    """

    key: Key
    step: int  # from 1
    steps: int
    estimate: Tensor | None = None
    checkpoint: bytes = b""


@dataclass(frozen=True, slots=True)
class FramesDecoded:
    """Report the next frames of a video: 8-bit RGB, `[frames, height, width, 3]`."""

    key: Key
    frames: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SoundDecoded:
    """Report the sound of a video, after its frames: `[channels, samples]` in -1 to 1."""

    key: Key
    samples: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PictureDone:
    """Report the finished picture, the end of a video whose frames came before, or the error."""

    key: Key
    picture: Image | None = None
    steps: int = 0
    error: MotetError | None = None


Event = StepDone | FramesDecoded | SoundDecoded | PictureDone
