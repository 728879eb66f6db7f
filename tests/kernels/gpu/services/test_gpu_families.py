"""Smoke of every family on a GPU: a tiny model says what transformers says, greedily, in float32.

Families that the installed transformers does not know are left out by name: an older release has fewer.
MOTET_GPU_DEVICE=cpu tries the same in Triton's interpreter, for `MOTET_GPU_DRY=1 make gpu`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from list_models import exact_on
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_shared.messages import Sampling
from support.families import language_families as families

PAGE = Path(__file__).parents[4] / "docs" / "models.md"
PROMPT = [(7 * i + 3) % 50 for i in range(11)]
TOKENS = 3
KNOWN = families.causal_classes()

pytestmark = pytest.mark.extended("gpu")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", exact_on(PAGE.read_text()))
def test_a_family_says_what_transformers_says(
    device: torch.device, tmp_path: Path, name: str
) -> None:
    if name not in KNOWN:
        pytest.skip(f"{name}: not in this release of transformers")
    where = os.environ.get("MOTET_GPU_DEVICE") or str(device)
    folder = families.write_checkpoint(name, tmp_path)
    model = families.class_of(name).from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    due = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )[0, len(PROMPT) :].tolist()  # fmt: skip
    engine = Engine(
        EngineConfig(
            model=str(folder), device=where, dtype="float32", weights="float32", threads=1,
            num_blocks=24, block_size=8, max_running=2, token_budget=16,
        )
    )  # fmt: skip
    engine.add("one", PROMPT, Sampling(max_tokens=TOKENS, temperature=0, ignore_eos=True))
    said: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            said += output.ids
    engine.close()
    assert said == due
