"""Read checkpoints of bitsandbytes: nf4 and fp4 in blocks, and LLM.int8 with a scale per output.

(QLoRA: arXiv 2305.14314; LLM.int8: arXiv 2208.07339. The columns that LLM.int8 computes in float16,
chosen by the inputs at run time, are computed from their 8-bit weights here.)

| tensor | 4 bits |
|---|---|
| `weight`, uint8 `[N · K / 2, 1]` | codes in row order, the first of a byte in its upper half |
| `weight.quant_state.bitsandbytes__nf4` (or `__fp4`) | JSON: block size, shape, offset |
| `weight.absmax` | float32, a scale per block; or uint8 codes of one |
| `weight.nested_absmax`, `weight.nested_quant_map` | what those codes mean, by blocks of scales |
| `weight.quant_map` | the 16 levels |

| tensor | 8 bits |
|---|---|
| `weight`, int8 `[N, K]` | codes |
| `SCB`, float32 `[N]` | the largest weight of each row, which is 127 |

Shapes: N output features, K input features.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from motet_kernels.linear.group_weights import GroupWeights
from motet_kernels.linear.levels import LEVELS
from motet_shared.errors import ConfigError

from .coded_linear import checked
from .tensor_files import TensorFiles

_FLOAT, _BYTE = (torch.float32,), (torch.uint8,)
_LEVELS = {"nf4": "nf4", "fp4": "bnb_fp4"}
_STATE_BYTES = 1 << 16  # most that a description of a matrix may take


class BitsAndBytes:
    """Read the matrices of one checkpoint by the names of their modules."""

    def __init__(self, settings: dict[str, Any], files: TensorFiles):
        self._files = files

    def has(self, module: str) -> bool:
        return f"{module}.weight.absmax" in self._files or f"{module}.SCB" in self._files

    def read(self, module: str, features: int, inputs: int) -> GroupWeights:
        """Return the weights of a module.

        Raises ConfigError that names a tensor which is missing or misshapen.
        """
        if f"{module}.SCB" in self._files:
            return self._eight_bits(module, features, inputs)
        return self._four_bits(module, features, inputs)

    def _eight_bits(self, module: str, features: int, inputs: int) -> GroupWeights:
        self._check_order(f"{module}.weight_format")
        codes_NK = self._files.need(f"{module}.weight", (features, inputs), (torch.int8,))
        scale_N = self._files.need(f"{module}.SCB", (features,), _FLOAT) / 127
        return checked(module, codes_NK, scale_N.unsqueeze(1), None, -(-inputs // 32) * 32)

    def _check_order(self, name: str) -> None:
        """Raise ConfigError unless the rows of codes are stored one after the other."""
        order = self._files.take(name)
        if order is not None and order.numel() and int(order.reshape(-1)[0]) != 0:
            raise ConfigError(f"{name}: rows in another order; save with a newer bitsandbytes")

    def _four_bits(self, module: str, features: int, inputs: int) -> GroupWeights:
        name, files = f"{module}.weight", self._files
        kind, state = self._state(name)
        group = state.get("blocksize")
        if not isinstance(group, int) or group < 32 or group % 32 or inputs % group:
            raise ConfigError(
                f"{name}: blocks of {group!r} do not divide rows of {inputs} inputs; quantize it "
                "with a block size that does"
            )
        packed = files.need(name, (features * inputs // 2, 1), _BYTE).view(features, -1)
        codes_NK = torch.stack((packed >> 4, packed & 15), dim=2).flatten(1)
        levels = LEVELS[_LEVELS[kind]]
        table = files.need(f"{name}.quant_map", (16,), _FLOAT)
        if not torch.allclose(table, levels.tensor, rtol=0, atol=1e-4):
            raise ConfigError(f"{name}.quant_map: not the levels of {kind}; quantize it again")
        scale = self._scales(name, features * inputs // group, state)
        scale_NG = scale.view(features, -1)
        return checked(module, codes_NK, scale_NG, None, group, levels=_LEVELS[kind])

    def _state(self, name: str) -> tuple[str, dict[str, Any]]:
        """Return the kind of codes and their description."""
        for kind in _LEVELS:
            full = f"{name}.quant_state.bitsandbytes__{kind}"
            tensor = self._files.take(full)
            if tensor is None:
                continue
            try:
                state = json.loads(bytes(tensor[:_STATE_BYTES].tolist()))
            except ValueError as error:
                raise ConfigError(f"{full}: no JSON; copy the checkpoint again") from error
            if not isinstance(state, dict):
                raise ConfigError(f"{full}: no JSON object; copy the checkpoint again")
            return kind, state
        raise ConfigError(f"{name}.quant_state is missing; copy the checkpoint again")

    def _scales(self, name: str, blocks: int, state: dict[str, Any]) -> Tensor:
        """Return a scale per block, float32."""
        files = self._files
        if files.dtype(f"{name}.absmax") != torch.uint8:
            return files.need(f"{name}.absmax", (blocks,), _FLOAT)
        codes = files.need(f"{name}.absmax", (blocks,), _BYTE)
        table = files.need(f"{name}.nested_quant_map", (256,), _FLOAT)
        size, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if not isinstance(size, int) or size < 1 or not isinstance(offset, int | float):
            raise ConfigError(
                f"{name}.quant_state: nested_blocksize={size!r}, nested_offset={offset!r} must be "
                "numbers; copy the checkpoint again"
            )
        coarse = files.need(f"{name}.nested_absmax", (-(-blocks // size),), _FLOAT)
        return table[codes.long()] * coarse.repeat_interleave(size)[:blocks] + offset
