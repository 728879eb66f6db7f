"""Pack weights in the order in which the matrix kernels read them.

That is panels of 32 output features, within a panel by input. Each format has a pack function and
its inverse over a range of panels; csrc/linear_*.cpp documents the layout of the bytes.

Shapes: N output features, K input features, P = ⌈N/32⌉ panels, G = ⌈K/32⌉ groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels.linear.quantization import GROUP
from motet_kernels.runtime.memory import huge_zeros

PANEL = 32
GROUP_BYTES = 576


def pack_floats(weight_NK: Tensor) -> Tensor:
    """Return `[P, K/2, 2, 32]` float32 or `[P, K/2, 32, 2]` bfloat16, by the weights' type."""
    blocks = _pad(weight_NK, 2).unflatten(0, (-1, PANEL)).unflatten(2, (-1, 2))
    return _on_huge_pages(
        blocks.permute(0, 2, 1, 3)
        if weight_NK.dtype == torch.bfloat16
        else blocks.permute(0, 2, 3, 1)
    )


def unpack_floats(packed: Tensor) -> Tensor:
    """Return the float32 rows `[32 panels, K]` of these panels, padding included."""
    blocks = (
        packed.permute(0, 2, 1, 3) if packed.dtype == torch.bfloat16 else packed.permute(0, 3, 1, 2)
    )
    return blocks.flatten(2).flatten(0, 1).float()


def pack_bytes(q_NK: Tensor) -> Tensor:
    """Return `[P, K/4, 32, 4]` bytes of w + 128 from int8 weights."""
    blocks = _pad(q_NK, 4).unflatten(0, (-1, PANEL)).unflatten(2, (-1, 4))
    return _on_huge_pages(blocks.permute(0, 2, 1, 3).to(torch.int16).add_(128).to(torch.uint8))


def unpack_bytes(packed: Tensor) -> Tensor:
    """Return the int8 weights as float32 `[32 panels, K]`, without their scales."""
    return packed.permute(0, 2, 1, 3).flatten(2).flatten(0, 1).float() - 128


def pack_nibbles(q_NK: Tensor, scale_NG: Tensor) -> Tensor:
    """Return `[P, G, 576]` bytes: 32 x 32 weights of four bits, then their 32 bfloat16 scales.

    A group of a panel holds 32 inputs of each of its 32 columns, and a scale per column.
    """
    blocks = (
        (_pad(q_NK, GROUP) + 8)
        .to(torch.uint8)
        .unflatten(0, (-1, PANEL))
        .unflatten(2, (-1, 2, 4, 4))
    )
    both = blocks[:, :, :, 0] | blocks[:, :, :, 1] << 4  # [P, 32, G, 4, 4]
    nibbles = both.permute(0, 2, 3, 1, 4).flatten(2)
    scales = (
        _pad(scale_NG, 1).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous().view(torch.uint8)
    )
    return _on_huge_pages(torch.cat([nibbles, scales], dim=2))


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return float32 weights `[32 panels, 32 G]`, scales applied."""
    both = packed[:, :, :512].unflatten(2, (4, PANEL, 4)).permute(0, 3, 1, 2, 4)
    q = torch.stack([both & 15, both >> 4], dim=3).flatten(2).float() - 8
    scales = packed[:, :, 512:].contiguous().view(torch.bfloat16).transpose(1, 2).float()
    output: Tensor = (q.unflatten(2, (-1, GROUP)) * scales.unsqueeze(3)).flatten(2).flatten(0, 1)
    return output


def pack_codes4(codes_NK: Tensor) -> Tensor:
    """Return `[P, G, 4, 32, 4]` bytes of codes from 0 to 15, without scales; see `pack_nibbles`."""
    blocks = _pad(codes_NK, GROUP).unflatten(0, (-1, PANEL)).unflatten(2, (-1, 2, 4, 4))
    both = blocks[:, :, :, 0] | blocks[:, :, :, 1] << 4  # [P, 32, G, 4, 4]
    return _on_huge_pages(both.permute(0, 2, 3, 1, 4))


def unpack_codes4(packed: Tensor) -> Tensor:
    """Return uint8 codes `[32 panels, 32 G]`."""
    both = packed.permute(0, 3, 1, 2, 4)  # [P, 32, G, 4, 4]
    return torch.stack([both & 15, both >> 4], dim=3).flatten(2).flatten(0, 1)


def pack_codes2(codes_NK: Tensor) -> Tensor:
    """Return `[P, G, 2, 32, 4]` bytes of codes from 0 to 3, four to a byte, the lowest bits first."""
    blocks = _pad(codes_NK, GROUP).unflatten(0, (-1, PANEL)).unflatten(2, (-1, 4, 2, 4))
    parts = [blocks[:, :, :, number] << 2 * number for number in range(4)]
    four = parts[0] | parts[1] | parts[2] | parts[3]  # [P, 32, G, 2, 4]
    return _on_huge_pages(four.permute(0, 2, 3, 1, 4))


def unpack_codes2(packed: Tensor) -> Tensor:
    """Return uint8 codes `[32 panels, 32 G]`."""
    four = packed.permute(0, 3, 1, 2, 4)  # [P, 32, G, 2, 4]
    parts = [four >> 2 * number & 3 for number in range(4)]
    return torch.stack(parts, dim=3).flatten(2).flatten(0, 1)


def pack_codes8(codes_NK: Tensor) -> Tensor:
    """Return `[P, G, 8, 32, 4]` bytes of c + 128 from int8 codes."""
    raised_NK = (_pad(codes_NK, GROUP).to(torch.int16) + 128).to(torch.uint8)
    blocks = raised_NK.unflatten(0, (-1, PANEL)).unflatten(2, (-1, 8, 4))
    return _on_huge_pages(blocks.permute(0, 2, 3, 1, 4))


def unpack_codes8(packed: Tensor) -> Tensor:
    """Return int8 codes `[32 panels, 32 G]`."""
    raised = packed.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)
    return (raised.to(torch.int16) - 128).to(torch.int8)


def codes_of_rows(packed: Tensor, rows_M: Tensor) -> Tensor:
    """Return the panels `[M, G, …, 1, 4]` of some output features, for the unpackers above."""
    return packed[rows_M // PANEL, :, :, rows_M % PANEL].unsqueeze(3)


def _pad(rows: Tensor, multiple: int) -> Tensor:
    return F.pad(rows, (0, -rows.shape[1] % multiple, 0, -rows.shape[0] % PANEL))


def _on_huge_pages(blocks: Tensor) -> Tensor:
    return huge_zeros(tuple(blocks.shape), blocks.dtype).copy_(blocks)
