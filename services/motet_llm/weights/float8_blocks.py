"""Read checkpoints of float8 in blocks, as DeepSeek and Qwen publish them: `quant_method` fp8.

| tensor | |
|---|---|
| `weight` | float8_e4m3fn `[N, K]` |
| `weight_scale_inv` | a scale per block `[N / 128, K / 128]`, or one; despite its name a weight is code · scale |
| `activation_scale` | not used: inputs are not rounded |

Shapes: N output features, K input features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from motet_kernels.linear.group_weights import FLOAT8, GroupWeights
from motet_shared.errors import ConfigError

from .coded_linear import checked
from .tensor_files import TensorFiles

_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_UNUSED = ("activation_scale", "input_scale")


class Float8Blocks:
    """Read the matrices of one checkpoint by the names of their modules.

    Raises ConfigError for settings that are not supported.
    """

    def __init__(self, settings: dict[str, Any], files: TensorFiles):
        self._files = files
        block = settings.get("weight_block_size")
        sizes = block if isinstance(block, list | tuple) else ()
        whole = all(isinstance(size, int) and size > 0 for size in sizes)
        if block is not None and not (len(sizes) == 2 and whole and sizes[1] % 16 == 0):
            raise ConfigError(
                f"quantization_config.weight_block_size={block!r}: give rows and a multiple of 16"
            )
        self._block: tuple[int, ...] | None = tuple(sizes) or None

    def has(self, module: str) -> bool:
        return self._files.dtype(f"{module}.weight") == FLOAT8

    def read(self, module: str, features: int, inputs: int) -> GroupWeights:
        """Return the weights of a module.

        Raises ConfigError that names a tensor which is missing or misshapen.
        """
        for end in _UNUSED:
            self._files.take(f"{module}.{end}")
        codes_NK = self._files.need(f"{module}.weight", (features, inputs), (FLOAT8,))
        scale_NG, group = self._scales(f"{module}.weight_scale_inv", features, inputs)
        return checked(module, codes_NK, scale_NG, None, group)

    def _scales(self, name: str, features: int, inputs: int) -> tuple[Tensor, int]:
        """Return scales, float32 `[N, G]`, and the size of a group in inputs."""
        if self._block is None:
            shape = self._files.shape(name)
            one = shape if shape in ((), (1,), (1, 1)) else ()
            scale = self._files.need(name, one, _SCALES).float()
            return scale.reshape(1, 1).repeat(features, 1), -(-inputs // 32) * 32
        high, wide = self._block
        blocks = (-(-features // high), -(-inputs // wide))
        scale_BG = self._files.need(name, blocks, _SCALES).float()
        return scale_BG.repeat_interleave(high, 0)[:features].contiguous(), wide
