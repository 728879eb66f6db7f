"""Read checkpoints whose experts are in MXFP4, as gpt-oss is published: `quant_method` mxfp4.

(OCP Microscaling Formats 1.0: blocks of 32 numbers of 4 bits with one exponent of 8 bits.)

| tensor | |
|---|---|
| `gate_up_proj_blocks`, `down_proj_blocks`, uint8 `[E, N, K / 32, 16]` | two codes a byte, the lower half first |
| `gate_up_proj_scales`, `down_proj_scales`, uint8 `[E, N, K / 32]` | exponents plus 127 |

Shapes: E experts, N output features, K input features.
"""

from __future__ import annotations

from typing import Any

import torch

from motet_kernels.linear.group_weights import GroupWeights
from motet_shared.errors import ConfigError

from .coded_linear import checked
from .tensor_files import TensorFiles

_BYTE = (torch.uint8,)


class Mxfp4:
    """Read the experts of one checkpoint by the names of their parameters."""

    def __init__(self, settings: dict[str, Any], files: TensorFiles):
        self._files = files

    def has(self, module: str) -> bool:
        return f"{module}_blocks" in self._files

    def read(self, module: str, features: int, inputs: int) -> GroupWeights:
        """Raise ConfigError: only experts are in this format."""
        raise ConfigError(f"{module}: only experts are read in mxfp4; give the original weights")

    def read_stack(self, name: str, experts: int, features: int, inputs: int) -> list[GroupWeights]:
        """Return the weights of each expert.

        Raises ConfigError that names a tensor which is missing or misshapen.
        """
        if inputs % 32:
            raise ConfigError(
                f"{name}: {inputs} inputs must be a multiple of 32; repair config.json"
            )
        shape = (experts, features, inputs // 32)
        blocks = self._files.need(f"{name}_blocks", (*shape, 16), _BYTE)
        exponents = self._files.need(f"{name}_scales", shape, _BYTE)
        found = []
        for number in range(experts):
            packed = blocks[number]
            codes_NK = torch.stack((packed & 15, packed >> 4), dim=3).flatten(1)
            scale_NG = torch.exp2(exponents[number].float() - 127)
            found.append(checked(f"{name}.{number}", codes_NK, scale_NG, None, 32, levels="fp4"))
        return found
