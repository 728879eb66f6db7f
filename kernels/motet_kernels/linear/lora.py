"""Add low-rank adapters (Hu et al. 2021) to a product, row by row: `out[m] += scale · B (A x[m])`.

Every row may have a different adapter, or none. Rows of one adapter are grouped into tiles; a free
row is in no tile and costs nothing. The factors of all adapters of a matrix are stored in slots of
one tensor, so that one call, and on a GPU one pair of launches, computes a mixed batch (as in
Punica, arXiv 2310.18547, and S-LoRA, arXiv 2311.03285). On the CPU a row's result is bit-identical
whatever other rows are in the batch, by construction (csrc/lora.cpp).

Shapes: M rows, K input features, N output features, S slots, R rank capacity of a slot, r rank of
an adapter, T tiles, P panels of 32 output features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet_kernels import gpu
from motet_kernels.linear.segments import Segments
from motet_kernels.runtime.arguments import GPU_FLOATS, check_device, is_cpu
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.memory import huge_zeros
from motet_kernels.runtime.native import Kernel

_PANEL = 32
_ALIGNMENT = 16  # inputs are padded to a multiple of this
_PIECE = (
    1 << 14
)  # elements copied at a time: for more, torch would use the threads that compute steps

_LORA = Kernel("motet_lora", "pipipipppippipiiiii")


class LoraFactors(nn.Module):
    """Hold the factors of up to S adapters of one matrix. An empty slot adds nothing.

    down: `[S, R, K]` on a GPU; on the CPU K is padded to a multiple of 16.
    up: `[S, N, R]` on a GPU; on the CPU `[S, P, R, 32]`.
    """

    down: Tensor
    up: Tensor
    ranks_S: Tensor
    scales_S: Tensor

    def __init__(
        self,
        slots: int,
        rank: int,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        """Allocate slots for adapters of rank up to `rank`.

        dtype: float32 or bfloat16, on a GPU also float16. Raises `KernelError` on others, and on
        less than one slot or rank.
        """
        super().__init__()
        where = torch.device(device)
        self._plain = gpu.is_gpu(where)
        if dtype not in (GPU_FLOATS if self._plain else GPU_FLOATS[:2]) or min(slots, rank) < 1:
            raise KernelError(
                f"slots: {slots} of rank {rank} in {dtype}; give at least 1, of float32 or bfloat16"
            )
        self.in_features, self.out_features = in_features, out_features
        shapes: list[tuple[int, ...]]
        if self._plain:
            max_rank = max(16, 1 << (rank - 1).bit_length())
            shapes = [(slots, max_rank, in_features), (slots, out_features, max_rank)]
        else:
            max_rank, width, panels = (
                -(-rank // 4) * 4,
                -(-in_features // _ALIGNMENT) * _ALIGNMENT,
                -(-out_features // _PANEL),
            )
            shapes = [(slots, max_rank, width), (slots, panels, max_rank, _PANEL)]
        self.max_rank = max_rank
        down, up = (self._zeros(shape, dtype, where) for shape in shapes)
        self.register_buffer("down", down)
        self.register_buffer("up", up)
        self.register_buffer("ranks_S", torch.zeros(slots, dtype=torch.int32, device=where))
        self.register_buffer("scales_S", torch.zeros(slots, dtype=torch.float32, device=where))

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros; on the CPU memory is committed only when it is written."""
        return (
            torch.zeros(shape, dtype=dtype, device=device)
            if self._plain
            else huge_zeros(shape, dtype)
        )

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())

    @torch.inference_mode(False)  # what it makes is written to outside of that mode
    @torch.no_grad()
    def grown(self, slots: int, rank: int) -> LoraFactors:
        """Return factors with room for at least so many adapters of that rank, these ones included."""
        old, most = len(self.ranks_S), self.max_rank
        grown = LoraFactors(
            max(slots, old),
            max(rank, most),
            self.in_features,
            self.out_features,
            self.down.dtype,
            self.down.device,
        )
        for slot in range(old):
            _in_pieces(Tensor.copy_, grown.down[slot, :most], self.down[slot])
            rows = grown.up[slot, ..., :most] if self._plain else grown.up[slot, :, :most]
            _in_pieces(Tensor.copy_, rows, self.up[slot])
        grown.ranks_S[:old] = self.ranks_S
        grown.scales_S[:old] = self.scales_S
        return grown

    def clear(self, slot: int) -> None:
        """Clear the slot: it adds nothing from now on."""
        self.ranks_S[slot] = 0
        self.scales_S[slot] = 0

    @torch.inference_mode()
    def put(self, slot: int, down_rK: Tensor, up_Nr: Tensor, scale: float) -> None:
        """Store an adapter's A and B in a slot, rounded to the type of the factors.

        No step that uses the slot may be running. Raises `KernelError` on shapes that do not fit.
        """
        rank = len(down_rK)
        if (
            down_rK.shape != (rank, self.in_features)
            or up_Nr.shape != (self.out_features, rank)
            or rank > self.max_rank
        ):
            raise KernelError(
                f"down_rK, up_Nr: {list(down_rK.shape)} and {list(up_Nr.shape)} must be [r, {self.in_features}] and "
                f"[{self.out_features}, r] with r of at most {self.max_rank}"
            )
        self.clear(slot)
        down, up = self.down[slot], self.up[slot]
        _in_pieces(Tensor.zero_, down)  # a GPU multiplies all R ranks of a slot
        _in_pieces(Tensor.zero_, up)
        _in_pieces(Tensor.copy_, down[:rank, : self.in_features], down_rK)
        if self._plain:
            _in_pieces(Tensor.copy_, up[:, :rank], up_Nr)
        else:
            whole = self.out_features // _PANEL
            panels = up_Nr[: whole * _PANEL].unflatten(0, (whole, _PANEL)).transpose(1, 2)
            _in_pieces(Tensor.copy_, up[:whole, :rank], panels)
            rest = up_Nr[whole * _PANEL :].T
            _in_pieces(
                Tensor.copy_, up[whole:, :rank, : rest.shape[1]], rest[None][: len(up) - whole]
            )
        self.scales_S[slot] = scale
        self.ranks_S[slot] = rank

    def factors(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return A and B of a slot as they are used, float32 `[R, K]` and `[N, R]`."""
        up = self.up[slot] if self._plain else self.up[slot].transpose(1, 2).flatten(0, 1)
        return self.down[slot, :, : self.in_features].float(), up[: self.out_features].float()

    def add(self, x: Tensor, out: Tensor, segments: Segments) -> None:
        """Add the adapters' products of x `[..., K]` to `out` `[..., N]`, in place.

        Both are of one type, float32 or bfloat16, on a GPU also float16; rows may be strided.
        Raises `KernelError` on tensors or segments that do not fit.
        """
        x_MK, out_MN = self._check(x, out, segments)
        if gpu.takes(x):
            from motet_kernels.gpu.linear import lora as kernels

            kernels.add_lora(x_MK, out_MN, segments.tiles_T3, segments.order_M, self)
            return
        native = _LORA.native() if is_cpu(x) and not self._plain else None
        if native is None:
            self.add_torch(x_MK, out_MN, segments)
        elif x.dtype == torch.float32:
            self._call(native, x_MK, out_MN, segments)
        else:
            wide_MN = out_MN.float()
            self._call(native, x_MK.float(), wide_MN, segments)
            out_MN.copy_(wide_MN)

    def _call(self, native: object, x_MK: Tensor, out_MN: Tensor, segments: Segments) -> None:
        hidden_MR = torch.empty(len(x_MK), self.max_rank)
        refused = native(  # type: ignore[operator]
            x_MK.data_ptr(),
            x_MK.stride(0),
            out_MN.data_ptr(),
            out_MN.stride(0),
            segments.tiles_T3.data_ptr(),
            len(segments.tiles_T3),
            segments.order_M.data_ptr(),
            self.down.data_ptr(),
            self.up.data_ptr(),
            self.down.dtype == torch.bfloat16,
            self.ranks_S.data_ptr(),
            self.scales_S.data_ptr(),
            len(self.ranks_S),
            hidden_MR.data_ptr(),
            len(x_MK),
            self.in_features,
            self.down.shape[2],
            self.out_features,
            self.max_rank,
        )
        if refused:
            raise KernelError(
                f"segments: a tile names a slot beyond {len(self.ranks_S)}, or rows that are not there"
            )

    def add_torch(self, x_MK: Tensor, out_MN: Tensor, segments: Segments) -> None:
        """Compute `add` in torch: its twin, with two products for each tile."""
        order = segments.order_M.long()
        for slot, first, count in segments.tiles_T3.tolist():
            rows = order[first : first + count]
            down_RK, up_NR = self.factors(slot)
            hidden = F.linear(x_MK[rows].float(), down_RK) * self.scales_S[slot]
            out_MN[rows] = (out_MN[rows].float() + F.linear(hidden, up_NR)).to(out_MN.dtype)

    def _check(self, x: Tensor, out: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        if x.dtype != out.dtype or x.dtype not in (GPU_FLOATS if gpu.takes(x) else GPU_FLOATS[:2]):
            raise KernelError(
                f"x: {x.dtype}, out: {out.dtype} must be one of float32, bfloat16, on a GPU also float16"
            )
        if x.shape[-1] != self.in_features or out.shape != (*x.shape[:-1], self.out_features):
            wanted = f"[..., {self.in_features}] and [..., {self.out_features}]"
            raise KernelError(
                f"x: {list(x.shape)}, out: {list(out.shape)} must be {wanted} of as many rows"
            )
        for name, tensor in (
            ("out", out),
            ("segments", segments.order_M),
            ("the factors", self.down),
        ):
            check_device(name, tensor, "x", x)
        x_MK, out_MN = _rows(x), _rows(out)
        if len(segments.order_M) != len(x_MK):
            raise KernelError(
                f"segments: of {len(segments.order_M)} rows, must be of {len(x_MK)}, as x"
            )
        if out_MN.data_ptr() != out.data_ptr() or out_MN.stride(1) != 1:
            raise KernelError(
                f"out: strides {list(out.stride())} must be of rows that lie at one distance"
            )
        return x_MK if x_MK.stride(1) == 1 else x_MK.contiguous(), out_MN

    def extra_repr(self) -> str:
        return f"slots={len(self.ranks_S)}, rank={self.max_rank}, {self.in_features} to {self.out_features}"


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 1 else x[None]


def _in_pieces(function: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Call `function` on a few rows of all tensors at a time."""
    if not tensors[0].numel():
        return
    rows = max(1, _PIECE // tensors[0][0].numel())
    for parts in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
        function(*parts)
