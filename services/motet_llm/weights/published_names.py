"""Translate the names of published checkpoints' tensors into those of transformers' models.

transformers has the rules (`conversion_mapping`), with which it renames and merges what it loads.
Here only names change: `block_sparse_moe.experts.0.w1.qweight` of Mixtral is
`mlp.experts.0.w1.qweight`. What is merged is read by expert (`coded_experts.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming


def renaming(model_type: str, class_name: str) -> Callable[[str], str]:
    """Return what a stored name is in the model; rules of the class come before those of the type."""
    rules: list[Any] = [
        rule
        for kind in (class_name, model_type)
        for rule in get_checkpoint_conversion_mapping(kind) or ()
        if type(rule) is WeightRenaming
    ]

    @cache
    def module_of(name: str) -> str:
        for rule in rules:
            name, _ = rule.rename_source_key(name)
        return name

    def renamed(name: str) -> str:
        """Apply rules to the weight of a module: codes and scales stand in its place."""
        module, _, end = name.rpartition(".")
        if not module or end in ("weight", "bias"):
            return module_of(name)
        whole = module_of(name)
        if whole != name:
            return whole
        weight = module_of(f"{module}.weight")
        return f"{weight.removesuffix('.weight')}.{end}" if weight != f"{module}.weight" else name

    return renamed
