"""Hold a checkpoint's quantized matrices as codes until `fuse` packs them: never dequantized.

Shapes: N output features, K input features, G groups of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet_kernels.linear.group_weights import GroupWeights, can_join, joined
from motet_kernels.linear.linear import Linear
from motet_kernels.linear.mixed_linear import MixedLinear
from motet_kernels.linear.pack import Packed, pack_groups
from motet_kernels.linear.scales import Scales
from motet_kernels.runtime.errors import KernelError
from motet_llm.models.joined_linear import JoinedLinear, JoinedPart
from motet_shared.errors import ConfigError

from .packer import Packer

CPU = torch.device("cpu")


class CodeSource:
    """Read a matrix's codes when they are first needed, and keep them. shape: `[N, K]`.

    A matrix that an earlier start has packed is never read.
    """

    def __init__(self, shape: tuple[int, int], read: Callable[[], GroupWeights]):
        self.shape, self._read = shape, read
        self._codes: GroupWeights | None = None

    def __call__(self) -> GroupWeights:
        if self._codes is None:
            self._codes = self._read()
        return self._codes


class CodedLinear(nn.Module):
    """Compute `y = x · Wᵀ + b` with quantized W, replacing an `nn.Linear`. name: for errors."""

    def __init__(self, name: str, source: CodeSource, bias: Tensor | None):
        super().__init__()
        self.name, self.source, self.bias = name, source, bias
        self.out_features, self.in_features = source.shape

    @property
    def codes(self) -> GroupWeights:
        return self.source()

    def forward(self, x: Tensor) -> Tensor:
        """Compute with the dequantized matrix, only to examine model code; see `packed`."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.codes.dense().to(x.dtype), bias)

    @property
    def weight(self) -> Tensor:
        """Raise ConfigError: model code that reads the weight would need the dequantized matrix."""
        raise ConfigError(
            f"{self.name}: this model reads the weight itself; give the original, unquantized checkpoint"
        )

    def packed(self, packer: Packer) -> Packed:
        """Return a packed layer that computes the same; see `pack_groups`."""
        return pack_groups(self.codes, self.bias, packer.device, precise=packer.precise)

    def taken(self, name: str, packer: Packer) -> Linear:
        """Return `packed`, or what an earlier start has packed under this name."""
        return packer.take(name, self.source.shape, lambda: self.packed(packer))


class CodedEmbedding(nn.Module):
    """Look up rows of a quantized table, times `scale`; `table` also serves as a tied head."""

    def __init__(self, source: CodeSource, dtype: torch.dtype, scale: float = 1.0):
        super().__init__()
        self.source, self.dtype, self.scale = source, dtype, scale
        self.table: Linear | None = None

    def pack(self, name: str, dtype: torch.dtype, packer: Packer) -> None:
        """Prepare to return rows of `dtype` on the packer's device. name: of the module."""

        def packed() -> Linear:
            if packer.device.type == "cpu" and not packer.precise:
                return self._table()
            return pack_groups(self.source(), None, packer.device, precise=packer.precise)

        self.table, self.dtype = packer.take(name, self.source.shape, packed), dtype

    def _table(self) -> Packed:
        if self.table is None:
            self.table = pack_groups(self.source(), None, CPU)
        table: Any = self.table
        packed: Packed = table
        return packed

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self._table().read(ids).to(self.dtype)
        if self.scale == 1:
            return rows
        return rows * torch.tensor(self.scale, dtype=self.dtype)  # rounded as the rows are


def join(parent: str, module: nn.Module, names: tuple[str, ...], packer: Packer) -> int:
    """Compute quantized children of these names as one product; return 1 if all exist, else 0.

    parent: name of the module.
    """
    children = [getattr(module, name, None) for name in names]
    coded = [child for child in children if isinstance(child, CodedLinear)]
    if len(coded) < len(names) or len({child.in_features for child in coded}) > 1:
        return 0
    shape = (sum(child.out_features for child in coded), coded[0].in_features)
    packed = packer.take(f"{parent}.{'+'.join(names)}", shape, lambda: _together(coded, packer))
    whole, start = JoinedLinear(packed), 0
    for name, child in zip(names, coded, strict=True):
        setattr(module, name, JoinedPart(whole, start, start + child.out_features))
        start += child.out_features
    return 1


def _together(coded: Sequence[CodedLinear], packer: Packer) -> Linear:
    """Return one matrix where codes and biases are compatible, else the matrices side by side."""
    biases = [child.bias for child in coded if child.bias is not None]
    codes = [child.codes for child in coded]
    if can_join(codes) and len(biases) in (0, len(coded)):
        bias = torch.cat(biases) if biases else None
        return pack_groups(joined(codes), bias, packer.device, precise=packer.precise)
    return MixedLinear([child.packed(packer) for child in coded])


def pack(
    model: nn.Module, siblings: Sequence[tuple[str, ...]], dtype: torch.dtype, packer: Packer
) -> int:
    """Pack all quantized modules in place, and return the number of matrices.

    dtype: of activations.
    """
    count, tables = 0, {}
    for name, embedding in list(model.named_modules()):
        if isinstance(embedding, CodedEmbedding):
            embedding.pack(name, dtype, packer)
            tables[id(embedding.source)] = embedding.table
    for parent, module in list(model.named_modules()):
        count += sum(join(parent, module, names, packer) for names in siblings)
        for name, child in list(module.named_children()):
            if isinstance(child, CodedLinear):
                table = tables.get(id(child.source))
                setattr(module, name, table or child.taken(f"{parent}.{name}", packer))
                count += 1
    return count


def of_steps(
    name: str,
    steps_NK: Tensor,
    scale_NG: Tensor,
    zero_NG: Tensor | None,
    bits: int,
    group: int,
    order_K: Tensor | None = None,
) -> GroupWeights:
    """Return weights `scale · (step - zero)` of steps from 0 to 2^bits - 1.

    group: inputs per group. zero_NG: None for the middle of the range. The result has four-bit
    codes where the kernels support it, else eight-bit ones. Raises ConfigError for a group size
    that the kernels do not support, and for zero points out of range.
    """
    half = 1 << (bits - 1)
    inputs = steps_NK.shape[1]
    group = -(-inputs // 32) * 32 if group in (-1, inputs) or group > inputs else group
    narrow = bits == 4
    middle = 0 if narrow else half  # subtracted from the steps
    if zero_NG is not None and not 0 <= int(zero_NG.min()) <= int(zero_NG.max()) < 1 << bits:
        raise ConfigError(f"{name}: a zero point is beyond {bits} bits; copy the checkpoint again")
    scale_NG = scale_NG.float()
    shift_NG = None
    if zero_NG is not None and not bool((zero_NG == half).all()):
        shift_NG = (middle - zero_NG.float()) * scale_NG
    codes_NK = (
        steps_NK.to(torch.uint8) if narrow else (steps_NK.to(torch.int16) - half).to(torch.int8)
    )
    return checked(name, codes_NK, scale_NG, shift_NG, group, order_K)


def checked(
    name: str,
    codes_NK: Tensor,
    scale_NG: Scales,
    shift_NG: Scales | None,
    group: int,
    order_K: Tensor | None = None,
    levels: str | None = None,
    narrow: bool = False,
) -> GroupWeights:
    """Return `GroupWeights` of the matrix `name`. Raises ConfigError if the kernels refuse them."""
    try:
        return GroupWeights(codes_NK, scale_NG, shift_NG, group, order_K, levels, narrow)
    except KernelError as error:
        raise ConfigError(
            f"{name}: {error}; give another checkpoint, or the original weights"
        ) from error
