"""Every family that transformers has a plan for, computed by groups: exact, or refused by name when it is loaded.

As in `test_parallel_engine.py`, requests move between a group and an engine of one rank, with prefix hits and chunks.
`MOTET_GROUPS=2/6` runs the second of six slices.
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from list_models import PAGE, exact_on
from motet_shared.errors import ConfigError
from support.engine.rank_families import check_family
from support.families import language_families as families

pytestmark = [pytest.mark.slow, pytest.mark.extended("groups"), pytest.mark.timeout(600)]

EXACT = exact_on(PAGE.read_text())
DEGREES = [
    {"tensor_parallel": 2},
    {"tensor_parallel": 4},
    {"pipeline_parallel": 3},
    {"expert_parallel": 4},
]
PLANS = {
    "tensor_parallel": "base_model_tp_plan",
    "pipeline_parallel": "base_model_pp_plan",
    "expert_parallel": "base_model_ep_plan",
}
_SHARED = "share keys and values"
# Families with a plan that a group does not compute, as tiny as they are here: what they are refused for.
REFUSED: dict[str, dict[str, str]] = {
    "tensor_parallel": {"LongcatFlashForCausalLM": "moe_identity_expert"},
    "pipeline_parallel": {
        "Gemma3nForCausalLM": _SHARED,
        "Gemma4ForCausalLM": _SHARED,
        "Gemma4UnifiedForCausalLM": _SHARED,
        "LongcatFlashForCausalLM": "it has 2 layers",
    },
    "expert_parallel": {
        "Gemma4ForCausalLM": "it has no experts",
        "NemotronHForCausalLM": "it has no experts",
    },
}
LEAST = 20  # families at each degree
SLICE, SLICES = map(int, os.environ.get("MOTET_GROUPS", "1/1").split("/"))
CASES = [*product(EXACT, DEGREES)][SLICE - 1 :: SLICES]


def is_planned(name: str, setting: str) -> bool:
    return bool(getattr(families.variant_config(name), PLANS[setting], None))


def named(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(f"{k}={n}" for k, n in value.items())


@pytest.mark.parametrize(("name", "degrees"), CASES, ids=named)
def test_a_family_is_exact_in_a_group_or_refused(
    name: str, degrees: dict[str, Any], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    ((setting, _),) = degrees.items()
    reason = REFUSED[setting].get(name, "transformers has no plan for")
    if is_planned(name, setting) and name not in REFUSED[setting]:
        check_family(name, tmp_path, **degrees)
        return
    with pytest.raises(ConfigError, match=f"^{setting}.*{reason}"):
        check_family(name, tmp_path, **degrees)


@pytest.mark.parametrize("setting", PLANS)
def test_the_families_are_many(setting: str) -> None:
    planned = {name for name in EXACT if is_planned(name, setting)}
    assert len(planned - REFUSED[setting].keys()) >= LEAST
