"""Read the tensors of a GGUF file that are plain numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .header import TensorPlace

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_bytes(place: TensorPlace) -> Tensor:
    """Return a tensor's bytes, in memory of their own."""
    mapped = np.memmap(place.path, np.uint8, "r", place.start, (place.nbytes,))
    return torch.from_numpy(np.array(mapped))


def read_plain(place: TensorPlace) -> Tensor:
    """Return a tensor of plain numbers in its own type and shape."""
    return read_bytes(place).view(PLAIN[place.kind]).reshape(place.shape)
