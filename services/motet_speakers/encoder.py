"""Run the speaker network: log-mel frames to one unit-length vector per stretch, in numpy.

A convolution that halves the frame rate, dilated residual convolutions, and attention-weighted mean
and deviation over time. `models/recipes/speakers/train.py` trains it.

Shapes: B stretches of equal length, T frames, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from motet_models.small_network import Floats, Sizes, SmallNetwork

from .features import BANDS

KERNEL = 5  # frames of the first convolution, which has a stride of 2
KERNEL_WIDTH = 3  # frames of the other convolutions, `dilation` apart
EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class Shape(Sizes):
    """Define the sizes of the network.

    width: channels.
    dilations: of the residual convolutions.
    pooled: channels before pooling.
    size: of the vectors.
    alike: cosine similarity of two vectors (each of about 1.5 s of speech) above which they more
        likely belong to one speaker than to two.
    """

    width: int = 128
    dilations: tuple[int, ...] = (1, 2, 3, 4)
    pooled: int = 256
    size: int = 128
    alike: float = 0.5

    def tensors(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {
            "first.weight": (KERNEL * BANDS, self.width),
            "first.bias": (self.width,),
        }
        for number in range(len(self.dilations)):
            found[f"deep.{number}.weight"] = (KERNEL_WIDTH * self.width, self.width)
            found[f"deep.{number}.bias"] = (self.width,)
        return found | {
            "wide.weight": (self.width, self.pooled),
            "wide.bias": (self.pooled,),
            "worth.weight": (self.pooled,),
            "out.weight": (2 * self.pooled, self.size),
            "out.bias": (self.size,),
        }


class SpeakerEncoder(SmallNetwork[Shape]):
    """Embed stretches of speech as unit-length vectors."""

    model_type, what, setting, sizes = "motet-speakers", "speaker encoder", "model", Shape

    def encode(self, features: Sequence[Floats]) -> Floats:
        """Return unit-length vectors (B, size) of each stretch's features (T, BANDS).

        Stretches of equal T are computed as one batch.
        """
        found = np.empty((len(features), self.shape.size), np.float32)
        lengths = np.array([len(one) for one in features])
        for length in np.unique(lengths):
            [places] = np.nonzero(lengths == length)
            found[places] = self._forward(np.stack([features[int(place)] for place in places]))
        return found

    def _forward(self, x_BTC: Floats) -> Floats:
        weights = self.weights
        x_BTC = _relu(
            _convolved(x_BTC, weights["first.weight"], KERNEL, 1)[:, ::2] + weights["first.bias"]
        )
        for number, dilation in enumerate(self.shape.dilations):
            pooled_input = _convolved(
                x_BTC, weights[f"deep.{number}.weight"], KERNEL_WIDTH, dilation
            )
            x_BTC = x_BTC + _relu(pooled_input + weights[f"deep.{number}.bias"])
        x_BTC = _relu(x_BTC @ weights["wide.weight"] + weights["wide.bias"])
        score = x_BTC @ weights["worth.weight"]
        attention = np.exp(score - score.max(axis=1, keepdims=True))[..., None]
        attention /= attention.sum(axis=1, keepdims=True)
        mean = (x_BTC * attention).sum(axis=1)
        deviation = np.sqrt(np.maximum((x_BTC**2 * attention).sum(axis=1) - mean**2, EPSILON))
        vector = (
            np.concatenate([mean, deviation], axis=1) @ weights["out.weight"] + weights["out.bias"]
        )
        value: Floats = (vector / np.linalg.norm(vector, axis=1, keepdims=True)).astype(np.float32)
        return value


def _convolved(x_BTC: Floats, weight: Floats, kernel: int, dilation: int) -> Floats:
    """Convolve with zero padding to the same length.

    `weight`: (kernel * C, channels), the earliest frame first.
    """
    half, frames = kernel // 2 * dilation, x_BTC.shape[1]
    padded = np.pad(x_BTC, ((0, 0), (half, half), (0, 0)))
    shifted = [
        padded[:, offset * dilation : offset * dilation + frames] for offset in range(kernel)
    ]
    return np.concatenate(shifted, axis=2) @ weight


def _relu(x: Floats) -> Floats:
    return np.maximum(x, 0)
