"""Every family that sees: prompts and greedy tokens are those of transformers' processor and `generate`.

With one picture, with several, and with none, in chunks that cut pictures where a model allows it.
One family for each mechanism is in `make test`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from motet_models.image_support import MODEL_TYPES
from support.checkpoints.vlm_checkpoints import picture
from support.families import processed_vlms
from support.families.encoded_chats import World
from support.running.tiers import mostly_long

SIZES = [(60, 50), (40, 90), (84, 84)]
# Its processor alone; pictures whose tokens see each other; deeper layers and three axes.
MECHANISMS = ["llava_next", "gemma3", "qwen3_vl_moe"]


def inputs_of(processor: Any, parts: Sequence[int | str]) -> dict[str, Any]:
    shown = [picture(part, *SIZES[part]) for part in parts if isinstance(part, int)]
    text = "".join(processor.image_token if isinstance(part, int) else part for part in parts)
    return dict(
        processor(
            images=[shown] if shown else None,
            text=[text],
            add_special_tokens=False,
            return_tensors="pt",
        )
    )


@pytest.mark.parametrize("name", mostly_long(processed_vlms.FAMILIES, MECHANISMS))
def test_pictures_are_seen_as_by_transformers(name: str, tmp_path: Path) -> None:
    world = World(
        name,
        processed_vlms.FAMILIES[name],
        tmp_path,
        [picture(number, *size) for number, size in enumerate(SIZES)],
        lambda family, one: family.prepare(one, 0),
        inputs_of,
    )
    world.compare(
        [
            world.talk("What is in ", 0, " and in ", 1, "?"),
            world.talk(2, "Tell me."),
            world.talk("No picture at all."),
            world.talk("twice: ", 1, " and ", 1, "."),
        ]
    )


def test_no_other_family_is_served_with_pictures() -> None:
    older = {"llava", "qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3"}  # in test_vlm_engine.py
    # in test_llm_omni.py and test_llm_qwen3_omni.py
    stages = {"qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"}
    assert {*processed_vlms.FAMILIES, *older, *stages} == MODEL_TYPES
