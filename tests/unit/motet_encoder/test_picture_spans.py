"""Pictures whose tokens see each other: computed whole, however small steps are and whatever is preempted."""

from __future__ import annotations

import pytest
import torch

from motet_llm.models.image_embeddings import ImageEmbedding
from motet_shared.errors import BadRequest, ConfigError
from motet_shared.messages import Sampling
from support.checkpoints.vlm_checkpoints import picture
from support.families import processed_vlms
from support.families.encoded_chats import World
from support.running.refusals import refuses


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(
        "gemma3",
        processed_vlms.FAMILIES["gemma3"],
        tmp_path_factory.mktemp("gemma3"),
        [picture(number) for number in range(3)],
        lambda family, one: family.prepare(one, 0),
        lambda processor, parts: dict(
            processor(
                images=[[picture(part) for part in parts if isinstance(part, int)]],
                text=["".join(processor.image_token if p in (0, 1, 2) else str(p) for p in parts)],
                add_special_tokens=False,
                return_tensors="pt",
            )
        ),
    )


@pytest.mark.parametrize("budget", [2, 5])
def test_steps_smaller_than_a_picture_do_not_cut_it(world: World, budget: int) -> None:
    world.engine = world.make_engine(token_budget=budget, max_running=2)
    world.compare([world.talk("Look: ", 0, " and ", 1, "?"), world.talk(2)])


def test_preempted_requests_begin_again_within_pictures(world: World) -> None:
    world.engine = world.make_engine(num_blocks=27, token_budget=16)
    talks = [world.talk(f"{key}: ", key % 3, " then ", (key + 1) % 3, ".") for key in range(6)]
    world.compare(talks)
    assert world.engine.stats()["preemptions"] > 0


def test_a_picture_longer_than_a_window_is_refused(world: World) -> None:
    engine, placeholder = world.make_engine(), world.family.placeholder
    wide = ImageEmbedding(torch.zeros(1, 13, 64), "wide")
    with refuses(BadRequest, "image_embeddings"):
        engine.add(0, [1, *[placeholder] * 13, 2], Sampling(), images=[wide])


def test_options_that_drop_keys_are_refused(world: World) -> None:
    with refuses(ConfigError, "attention_budget"):
        world.make_engine(attention_budget=16)
