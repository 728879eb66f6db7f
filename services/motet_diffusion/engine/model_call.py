"""Define what a picture's loop asks the engine to compute: one call of a model that pictures share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from .merge import Call
from .request import Lora

DENOISER = ""


class PromptTokens(NamedTuple):
    """Hold an image prompt: the IP-Adapter that read it, `[rows, tokens, channels]`, and a scale.

    time: embedding of the step's time `[rows, channels]`, for adapters that depend on it (SD3's).
    """

    name: str
    tokens: Tensor
    scale: float = 1.0
    time: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelCall:
    """Hold a call of the denoiser, or of a ControlNet by its name in `target`.

    loras, prompts: what takes part in the rows of this call, and of no other in the same pass. part:
    number of the denoiser's call within its step: some pipelines call it for each prompt.
    """

    call: Call
    target: str = DENOISER
    loras: tuple[Lora, ...] = ()
    prompts: tuple[PromptTokens, ...] = ()
    part: int = 0


Denoise = Callable[[ModelCall], Any]
