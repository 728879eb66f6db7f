"""Compute a mixture's experts by packed matrices, one pair for each expert.

Replaces modules that transformers' `use_experts_implementation` marks: their parameters are
`gate_up_proj` and `down_proj` (`up_proj` for experts without gate), each of all experts, and
`_apply_gate` joins gate and up. `other_experts.py` reads those of other structure.

Shapes: T tokens, E experts, k of them per token, H hidden size, I inner size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from motet_kernels import gpu
from motet_kernels.linear.expert_linear import ExpertLinear, ExpertRows
from motet_llm.weights.packer import Packer

Product = Callable[[Tensor], Tensor]


def is_experts(module: nn.Module) -> bool:
    """Return True if a module's experts can be computed by packed matrices."""
    return (
        hasattr(module, "has_gate")
        and not getattr(module, "has_post_expert_norm", False)
        and hasattr(module, "_apply_gate")
        and all(_is_stack(getattr(module, name, None)) for name in parameters_of(module))
    )


def parameters_of(experts: Any) -> tuple[str, str]:
    """Return the names of the parameters that come first and last."""
    return ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")


def _is_stack(parameter: Any) -> bool:
    return isinstance(parameter, Tensor) and parameter.dim() == 3


def mix(
    rows_TH: Tensor,
    index_Tk: Tensor,
    weights_Tk: Tensor,
    gate: Product,
    gate_up: Sequence[Product],
    down: Sequence[Product],
) -> Tensor:
    """Return each token's experts' results, times its weights, summed from the first expert on.

    An index that is no expert's adds nothing.
    """
    out_TH, flat = torch.zeros_like(rows_TH), index_Tk.reshape(-1)
    order = flat.argsort(stable=True)
    tokens, scales = order // index_Tk.shape[-1], weights_Tk.reshape(-1)[order].unsqueeze(1)
    start = 0
    for expert, count in enumerate(flat.bincount(minlength=len(down)).tolist()[: len(down)]):
        if not count:
            continue
        part = slice(start, start + count)
        inner = gate(gate_up[expert](rows_TH[tokens[part]]))
        result = down[expert](inner) * scales[part]
        out_TH.index_add_(0, tokens[part], result.to(out_TH.dtype))
        start += count
    return out_TH


class PackedExperts(nn.Module):
    """Compute experts by a `Linear` for each matrix; `gate` is what is between them."""

    def __init__(self, gate: Product, gate_up: Sequence[nn.Module], down: Sequence[nn.Module]):
        super().__init__()
        self.gate = gate
        self.gate_up, self.down = nn.ModuleList(gate_up), nn.ModuleList(down)

    def forward(self, hidden: Tensor, index_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        rows_TH = hidden.reshape(-1, hidden.shape[-1])
        gate_up, down = list(self.gate_up), list(self.down)
        return mix(rows_TH, index_Tk, weights_Tk, self.gate, gate_up, down).view(hidden.shape)


class GroupedExperts(nn.Module):
    """Compute all experts of a layer with one product each for `gate_up` and `down`, on a GPU."""

    def __init__(self, gate: Product, gate_up: ExpertLinear, down: ExpertLinear):
        super().__init__()
        self.gate, self.gate_up, self.down = gate, gate_up, down

    def forward(self, hidden: Tensor, index_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """Return each token's results, times its weights, summed in float32."""
        rows_TH = hidden.reshape(-1, hidden.shape[-1])
        rows = ExpertRows.of(index_Tk, self.down.experts)
        inner_RI = self.gate(self.gate_up(rows_TH[rows.order_R // index_Tk.shape[-1]], rows))
        result_RH = self.down(inner_RI, rows)
        routes_RH = torch.empty_like(result_RH).index_copy_(0, rows.order_R, result_RH)
        routes_TkH = routes_RH.view(*index_Tk.shape, -1)
        out_TH = (routes_TkH.float() * weights_Tk.float().unsqueeze(-1)).sum(1)
        return out_TH.to(hidden.dtype).view(hidden.shape)


def pack_experts(name: str, experts: Any, packer: Packer) -> PackedExperts | GroupedExperts:
    """Return packed experts; the originals' weights are freed. name: of their module."""
    if gpu.is_gpu(packer.device):
        return _group(experts, packer)
    packed: list[Sequence[nn.Module]] = []
    for part in parameters_of(experts):
        stack, bias_EN = getattr(experts, part), getattr(experts, f"{part}_bias", None)
        turned = stack.transpose(1, 2) if experts.is_transposed else stack
        packed.append(packer.stack(f"{name}.{part}", turned, bias_EN))
    return PackedExperts(gate_of(experts), *packed)


def _group(experts: Any, packer: Packer) -> GroupedExperts:
    made = []
    for part in parameters_of(experts):
        stack, bias_EN = getattr(experts, part), getattr(experts, f"{part}_bias", None)
        turned = stack.transpose(1, 2) if experts.is_transposed else stack
        made.append(ExpertLinear.quantized(turned, bias_EN, packer.form, packer.device))
    return GroupedExperts(gate_of(experts), *made)


def gate_of(experts: Any) -> Product:
    """Return the function between the two products, and delete the parameters of the module."""
    for name in [name for name, _ in experts.named_parameters(recurse=False)]:
        delattr(experts, name)
    gate: Product = experts._apply_gate if experts.has_gate else experts.act_fn
    return gate
