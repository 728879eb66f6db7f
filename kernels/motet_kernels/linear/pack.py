"""Pack weights in a format, for the device that will compute with them.

Shapes: N output features, K input features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.linear.code_linear import CodeLinear
from motet_kernels.linear.group_weights import GroupWeights, quantize_float8
from motet_kernels.linear.grouped_linear import GroupedLinear
from motet_kernels.linear.linear import Linear
from motet_kernels.linear.row_linear import RowLinear
from motet_kernels.runtime.errors import KernelError

Packed = CodeLinear | GroupedLinear

FORMATS = ("float32", "bfloat16", "int8", "int4")
GPU_FORMATS = (*FORMATS, "float16")
# An int32 can sum 255 · 127 this many times.
MAX_INT8_INPUTS = 1 << 16


def pack_linear(
    weight_NK: Tensor,
    bias_N: Tensor | None,
    form: str,
    device: torch.device | str | None = None,
) -> Linear:
    """Pack weights in a format of FORMATS, to compute on `device`, by default their own.

    The weights are float32 or bfloat16; for a GPU and for float8 also float16. "float8" is a
    format too, computed by `grouped_linear.py`: a scale per output, and the input not rounded.
    On a GPU float16 is a format as well. The tensors given are not kept. Raises `KernelError`
    on another format, type or shape, and for int8, int4 and float8 on a weight that is not
    finite.
    """
    device = weight_NK.device if device is None else torch.device(device)
    if form == "float8":
        _check_weight(weight_NK, bias_N, "float32", GPU_FORMATS)
        packed = GroupedLinear(quantize_float8(weight_NK), bias_N, device)
        packed.format = form
        return packed
    on_gpu = gpu.is_gpu(device)
    _check_weight(weight_NK, bias_N, form, GPU_FORMATS if on_gpu else FORMATS)
    if on_gpu:
        return RowLinear.from_rows(weight_NK, bias_N, form, device)
    return Linear.from_panels(weight_NK, bias_N, form)


def pack_groups(
    weights: GroupWeights, bias_N: Tensor | None, device: torch.device, *, precise: bool = False
) -> Packed:
    """Pack a checkpoint's codes to compute on `device`.

    On a CPU rows are rounded as `CodeLinear` says, with `precise` to 16 bits. Only float8 takes
    rows in as they are, as all formats do on a GPU.
    """
    if weights.format == "float8" or gpu.is_gpu(device):
        return GroupedLinear(weights, bias_N, device)
    return CodeLinear(weights, bias_N, precise=precise)


def _check_weight(
    weight_NK: Tensor, bias_N: Tensor | None, form: str, formats: tuple[str, ...]
) -> None:
    if form not in formats:
        raise KernelError(f"format: {form!r} must be one of {', '.join(formats)}")
    kinds = ("float32", "bfloat16", "float16") if "float16" in formats else ("float32", "bfloat16")
    if weight_NK.dtype not in [getattr(torch, kind) for kind in kinds]:
        raise KernelError(
            f"weight_NK: {weight_NK.dtype} on {weight_NK.device} must be {' or '.join(kinds)}"
        )
    if weight_NK.dim() != 2 or 0 in weight_NK.shape:
        raise KernelError(
            f"weight_NK: shape {list(weight_NK.shape)} must be [N, K] with neither zero"
        )
    if form == "int8" and weight_NK.shape[1] > MAX_INT8_INPUTS:
        raise KernelError(
            f"weight_NK: {weight_NK.shape[1]} input features must be at most {MAX_INT8_INPUTS} for int8"
        )
    if bias_N is not None and bias_N.shape != weight_NK.shape[:1]:
        raise KernelError(f"bias_N: shape {list(bias_N.shape)} must be [{weight_NK.shape[0]}]")
