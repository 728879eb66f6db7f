"""Experts of every structure compute with packed matrices what transformers' modules compute."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from motet_llm.models import other_experts
from motet_llm.weights.packer import Packer

CPU = torch.device("cpu")
HIDDEN, INNER, EXPERTS, TOKENS = 64, 32, 4, 7
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "ffn_hidden_size": INNER,
    "expert_ffn_hidden_size": INNER,
    "moe_intermediate_size": INNER,
    "moe_latent_size": None,
    "moe_num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "zero_expert_num": 2,
    "hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "ffn_act_fn": {"name": "silu"},
    "_experts_implementation": "eager",
}


def _drawn(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.requires_grad_(False).parameters():
        parameter.normal_(std=0.1)
    return module


def _routed(experts: int) -> tuple[Tensor, ...]:
    drawn = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=drawn)
    index = torch.stack([torch.randperm(experts, generator=drawn)[:2] for _ in range(TOKENS)])
    return hidden, index, torch.rand(TOKENS, 2, generator=drawn)


def _of_all_tokens() -> tuple[Tensor, ...]:
    hidden, index, _ = _routed(EXPERTS)
    chosen = torch.zeros(TOKENS, EXPERTS).scatter(1, index, 0.7)
    return ((chosen.T.unsqueeze(2) * hidden).reshape(-1, HIDDEN).contiguous(),)


MODULES: dict[str, tuple[Any, Any]] = {
    "llama4": (lambda c: Llama4TextExperts(c), _of_all_tokens),
    "dbrx": (lambda c: DbrxExperts(c), lambda: _routed(EXPERTS)),
    "jetmoe": (
        lambda c: JetMoeParallelExperts(EXPERTS, HIDDEN, INNER),
        lambda: (torch.randn(TOKENS, HIDDEN), [3, 0, 4, 0]),
    ),
    "longcat_flash": (lambda c: LongcatFlashExperts(c), lambda: _routed(EXPERTS + 2)),
    "nemotron_h": (lambda c: NemotronHExperts(c), lambda: _routed(EXPERTS)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(("form", "bound"), [("float32", 1e-5), ("bfloat16", 0.01)])
def test_packed_experts_are_the_original(name: str, form: str, bound: float) -> None:
    make, inputs = MODULES[name]
    original, given = _drawn(make(SimpleNamespace(**SIZES))), inputs()
    packed = other_experts.pack("experts", copy.deepcopy(original), Packer(form, CPU))
    assert packed is not None
    due, found = original(*given), packed(*given)
    assert float((found.view(due.shape) - due).norm() / due.norm()) < bound


@pytest.mark.parametrize("name", MODULES)
def test_the_weights_of_the_original_are_freed(name: str) -> None:
    original = _drawn(MODULES[name][0](SimpleNamespace(**SIZES)))
    other_experts.pack("experts", original, Packer("int8", CPU))
    assert not list(original.parameters())


def test_other_modules_are_left_alone() -> None:
    assert other_experts.pack("linear", nn.Linear(4, 4), Packer("int8", CPU)) is None


@pytest.mark.long
def test_no_family_has_experts_left_in_stacks() -> None:
    """In 16 bits, or in codes, whatever the structure: float32 would take twice the memory."""
    from support.families.language_families import class_of, variant_config

    page = (Path(__file__).parents[4] / "docs" / "models.md").read_text()
    served = [row.split("|") for row in page.partition("\n## Refused")[0].splitlines()]
    names = [cells[2].strip() for cells in served if len(cells) > 3 and "experts" in cells[3]]
    assert len(names) > 40
    for name in (*names, "gemma4, experts"):
        model = class_of(name)(variant_config(name)).bfloat16().requires_grad_(False)
        for parent in list(model.modules()):
            for child_name, child in list(parent.named_children()):
                if (
                    experts := other_experts.pack(name, child, Packer("bfloat16", CPU))
                ) is not None:
                    setattr(parent, child_name, experts)
        left = [
            key
            for key, parameter in model.named_parameters()
            if key.endswith((".w1", ".v1", ".w2")) or (parameter.dim() == 3 and "conv" not in key)
        ]
        assert not left, name
