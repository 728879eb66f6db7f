"""Pack the experts of families whose modules have a structure of their own.

| family | its experts |
|---|---|
| DBRX | three matrices of all experts' rows |
| JetMoe | one stack of matrices per product, also for queries and outputs of attention |
| Llama 4 | every expert gets all tokens, zeros where it is not chosen |
| LongCat-Flash | some experts return what they get |

Shapes: T tokens, E experts, k of them per token, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from motet_kernels import gpu
from motet_llm.weights.packer import Packer

from .experts import PackedExperts, Product, is_experts, mix, pack_experts


def pack(name: str, module: nn.Module, packer: Packer) -> nn.Module | None:
    """Return packed experts; None if the module has none.

    The weights of `module`, whose name in the model is `name`, are freed.
    """
    if is_experts(module):
        return pack_experts(name, module, packer)
    if gpu.is_gpu(packer.device):
        return None  # of these structures, which stay transformers'
    known = _PACKERS.get(type(module).__name__)
    return None if known is None else known(name, module, packer)


def _gated(activation: Product) -> Product:
    def gate(gate_up: Tensor) -> Tensor:
        first, second = gate_up.chunk(2, dim=-1)
        return activation(first) * second

    return gate


def _free(module: nn.Module) -> None:
    for name in [name for name, _ in module.named_parameters(recurse=False)]:
        setattr(module, name, None)


# -------------------------------------------------------------------------------------------- DBRX
def _dbrx(name: str, experts: Any, packer: Packer) -> nn.Module:
    glu, count = experts.mlp, experts.num_experts
    gate, up, down = (
        matrix.detach().view(count, -1, glu.hidden_size) for matrix in (glu.w1, glu.v1, glu.w2)
    )
    gate_up = [
        packer.linear(f"{name}.gate_up.{number}", one, None)
        for number, one in enumerate(zip(gate, up, strict=True))
    ]
    down_proj = packer.stack(f"{name}.down", down.transpose(1, 2), None)
    packed = PackedExperts(_gated(glu.activation_fn), gate_up, down_proj)
    _free(glu)
    return packed


# ------------------------------------------------------------------------------------------ JetMoe
class ParallelExperts(nn.Module):
    """Multiply rows, sorted by expert, by their expert's matrix."""

    def __init__(self, layers: Sequence[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.out_features = int(layers[0].out_features)  # type: ignore[arg-type]

    def forward(self, rows_NH: Tensor, counts_E: list[int]) -> Tensor:
        parts = zip(self.layers, rows_NH.split(counts_E), strict=True)
        found = [layer(part) for layer, part in parts if len(part)]
        return torch.cat(found) if found else rows_NH.new_zeros(0, self.out_features)


def _jetmoe(name: str, experts: Any, packer: Packer) -> nn.Module:
    packed = ParallelExperts(packer.stack(name, experts.weight, None))
    _free(experts)
    return packed


# ----------------------------------------------------------------------------------------- Llama 4
class ExpertsOfAllTokens(nn.Module):
    """Compute each expert's nonzero rows; rows of zeros give zeros."""

    def __init__(self, gate: Product, gate_up: Sequence[nn.Module], down: Sequence[nn.Module]):
        super().__init__()
        self.gate = gate
        self.gate_up, self.down = nn.ModuleList(gate_up), nn.ModuleList(down)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a result per row; hidden: the tokens of the first expert, then the next's."""
        rows_ETH = hidden.view(len(self.down), -1, hidden.shape[-1])
        out_ETH, is_routed_ET = torch.zeros_like(rows_ETH), rows_ETH.any(-1)
        for expert in is_routed_ET.any(-1).nonzero().flatten().tolist():
            tokens = is_routed_ET[expert].nonzero().flatten()
            inner = self.gate(self.gate_up[expert](rows_ETH[expert, tokens]))
            out_ETH[expert, tokens] = self.down[expert](inner).to(out_ETH.dtype)
        return out_ETH.view(hidden.shape)


def _llama4(name: str, experts: Any, packer: Packer) -> nn.Module:
    stacks = [
        packer.stack(f"{name}.{part}", getattr(experts, part).transpose(1, 2), None)
        for part in ("gate_up_proj", "down_proj")
    ]
    _free(experts)
    return ExpertsOfAllTokens(_gated(experts.act_fn), *stacks)


# ------------------------------------------------------------------------------------ LongCat-Flash
class ExpertsAndIdentities(PackedExperts):
    """Compute experts; an index beyond them returns the token itself, times its weight."""

    def forward(self, hidden: Tensor, index_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        rows_TH = hidden.reshape(-1, hidden.shape[-1])
        gate_up, down = list(self.gate_up), list(self.down)
        mixed_TH = mix(rows_TH, index_Tk, weights_Tk, self.gate, gate_up, down)
        kept_T1 = weights_Tk.where(index_Tk >= len(down), 0).sum(-1, keepdim=True)
        return (mixed_TH + (rows_TH * kept_T1).to(rows_TH.dtype)).view(hidden.shape)


def _longcat(name: str, experts: Any, packer: Packer) -> nn.Module:
    gate_up = experts.gate_up_proj[: experts.num_routed_experts]
    stacks = [
        packer.stack(f"{name}.gate_up_proj", gate_up, None),
        packer.stack(f"{name}.down_proj", experts.down_proj, None),
    ]
    _free(experts)
    return ExpertsAndIdentities(_gated(experts.act_fn), *stacks)


_PACKERS: dict[str, Callable[[str, Any, Packer], nn.Module]] = {
    "DbrxExperts": _dbrx,
    "JetMoeParallelExperts": _jetmoe,
    "Llama4TextExperts": _llama4,
    "LongcatFlashExperts": _longcat,
}
