"""Build the tables of `log_mel.py`: the windowed Fourier transform and the mel filters.

Shapes: W samples of a frame, F frequencies, M bands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from motet_kernels.runtime.errors import KernelError

FLOOR = 1e-10  # lower bound of a band's power, before the logarithm


@dataclass(frozen=True)
class MelTables:
    """Hold cosines and sines times the window, `[W, F]`, and the mel filters, `[F, M]`; float32.

    hop: samples from frame to frame.
    """

    cosines_WF: Tensor
    sines_WF: Tensor
    filters_FM: Tensor
    hop: int

    @classmethod
    def of(cls, window_W: Tensor, filters_FM: Tensor, hop: int) -> MelTables:
        """Build the tables for a window, whose length W is that of the transform, and mel filters.

        Raises `KernelError` if the sizes do not fit.
        """
        width, frequencies = len(window_W), len(filters_FM)
        if frequencies != width // 2 + 1 or width % 2:
            raise KernelError(
                f"filters_FM: {frequencies} rows must be W / 2 + 1, where W={width} is even"
            )
        if hop < 1:
            raise KernelError(f"hop: {hop} must be at least 1")
        turns = torch.outer(torch.arange(width), torch.arange(frequencies)) % width
        angles_WF = turns.double() * (2 * math.pi / width)
        window_W1, device = window_W.double().cpu()[:, None], window_W.device
        cosines, sines = (
            (part * window_W1).to(device, torch.float32)
            for part in (angles_WF.cos(), angles_WF.sin())
        )
        return cls(cosines, sines, filters_FM.to(device, torch.float32).contiguous(), hop)
