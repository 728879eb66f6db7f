"""Attention of every token of a sequence to all of them, as encoders have it.

Shapes: S tokens, H heads, D dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import check_device, check_floats, is_cpu
from .errors import KernelError
from .native import Kernel

_ATTEND = Kernel("motet_full_attention", "piipiipiipiiifi")


def full_attention(
    query_SHD: Tensor, key_SHD: Tensor, value_SHD: Tensor, *, scale: float, rounded: bool = False
) -> Tensor:
    """`softmax(scale · Q · Kᵀ) · V` of each head, `[S, H, D]` in the queries' type.

    All three have one shape and any strides but a dense last dimension, so they may be parts of one matrix. `rounded`
    multiplies in 16-bit steps (queries and keys of their own largest number, values of a channel's in 1023 parts),
    twice as fast where there are no instructions for less: off by about a thousandth. The twin never rounds. On the
    CPU a token's result depends, down to the bit, on the sequence alone, not on the number of threads.
    """
    tensors = {"query_SHD": query_SHD, "key_SHD": key_SHD, "value_SHD": value_SHD}
    for name, tensor in tensors.items():
        check_floats(name, tensor, 3)
        check_device(name, tensor, "query_SHD", query_SHD)
        if tensor.shape != query_SHD.shape:
            raise KernelError(f"{name}: shape {list(tensor.shape)} must be the queries' {list(query_SHD.shape)}")
    attend = _ATTEND.native() if is_cpu(query_SHD) else None
    if attend is None:
        return full_attention_torch(query_SHD, key_SHD, value_SHD, scale=scale)
    query, key, value = (tensor.float() for tensor in tensors.values())
    out = torch.empty(query.shape)
    attend(
        *(query.data_ptr(), *query.stride()[:2]),
        *(key.data_ptr(), *key.stride()[:2]),
        *(value.data_ptr(), *value.stride()[:2]),
        out.data_ptr(),
        *query.shape,
        scale,
        rounded,
    )
    return out.to(query_SHD.dtype)


def full_attention_torch(query_SHD: Tensor, key_SHD: Tensor, value_SHD: Tensor, *, scale: float) -> Tensor:
    """The twin."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query_SHD, key_SHD, value_SHD))
    return F.scaled_dot_product_attention(query, key, value, scale=scale)[0].transpose(0, 1).contiguous()
