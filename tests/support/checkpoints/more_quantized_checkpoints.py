"""Write tiny checkpoints of float8 blocks and of bitsandbytes, with their float32 values.

They are written from the formats' descriptions; no code is shared with the loader.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from support.checkpoints.quantized_checkpoints import make

NF4 = np.array(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ],
    np.float32,
)
_FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / 12
FP4 = np.concatenate((_FP4, -_FP4))


def float8_blocks(folder: Path, block: int = 128) -> tuple[Path, Path]:
    """Write `quant_method` fp8 with a scale per square block; block 0: per matrix."""

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        high, wide = (block, block) if block else weight.shape
        squares = weight.view(weight.shape[0] // high, high, weight.shape[1] // wide, wide)
        scale = squares.abs().amax((1, 3)) / 448
        whole = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)
        codes = (weight / whole).to(torch.float8_e4m3fn)
        stored = scale if block else scale.reshape(())
        tensors = {"weight": codes, "weight_scale_inv": stored}
        return tensors, codes.float() * whole

    settings = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block] if block else None,
    }
    return make(folder, settings, pack, "qwen3")


def bnb_four_bits(folder: Path, kind: str, *, nested: bool) -> tuple[Path, Path]:
    """Write bitsandbytes' nf4 or fp4 in blocks of 64; nested: scales are quantized too."""
    levels = NF4 if kind == "nf4" else FP4

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        blocks = weight.numpy().reshape(-1, 64)
        scales = np.abs(blocks).max(1)
        state = {"quant_type": kind, "blocksize": 64, "shape": list(weight.shape)}
        tensors: dict[str, Tensor] = {"weight.absmax": torch.from_numpy(scales)}
        if nested:
            tensors, scales, offset = _nested(scales)
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
        apart = np.abs(blocks[:, :, None] / scales[:, None, None] - levels)
        codes = apart.argmin(2).astype(np.uint8)
        flat = codes.reshape(-1)
        tensors["weight"] = torch.from_numpy((flat[::2] << 4 | flat[1::2]).reshape(-1, 1))
        tensors["weight.quant_map"] = torch.from_numpy(levels.copy())
        text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.from_numpy(text)
        dense = levels[codes] * scales[:, None]
        return tensors, torch.from_numpy(dense.reshape(weight.shape))

    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
    }
    return make(folder, settings, pack)


def _nested(scales: np.ndarray) -> tuple[dict[str, Tensor], np.ndarray, float]:
    """Return tensors of scales in 8 bits, the scales that they stand for, and their mean."""
    offset = float(scales.mean())
    table = np.linspace(-1, 1, 256, dtype=np.float32)
    padded = np.pad(scales - offset, (0, -len(scales) % 256)).reshape(-1, 256)
    coarse = np.abs(padded).max(1).astype(np.float32)
    codes = np.abs(padded[:, :, None] / coarse[:, None, None] - table).argmin(2).astype(np.uint8)
    found = (table[codes] * coarse[:, None]).reshape(-1)[: len(scales)] + np.float32(offset)
    tensors = {
        "weight.absmax": torch.from_numpy(codes.reshape(-1)[: len(scales)].copy()),
        "weight.nested_absmax": torch.from_numpy(coarse),
        "weight.nested_quant_map": torch.from_numpy(table),
    }
    return tensors, found.astype(np.float32), offset


def bnb_eight_bits(folder: Path) -> tuple[Path, Path]:
    """Write bitsandbytes' LLM.int8: a largest value per row."""

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        largest = weight.abs().amax(1)
        codes = (weight * 127 / largest[:, None]).round().to(torch.int8)
        tensors = {
            "weight": codes,
            "SCB": largest,
            "weight_format": torch.zeros((), dtype=torch.uint8),
        }
        return tensors, codes.float() * largest[:, None] / 127

    return make(folder, {"quant_method": "bitsandbytes", "load_in_8bit": True}, pack)
