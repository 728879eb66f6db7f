"""The stages of Qwen2.5-Omni compute what transformers' `generate` computes: tokens, and codes.

Thinker and talker are engines of their own, over prompts of text, pictures and sound. The talker gets
states as the thinker computes them, one by one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from motet_llm.models.image_embeddings import ImageEmbedding, ImageEmbeddings
from motet_llm.stages.states import GivenStates
from motet_shared.errors import BadRequest
from motet_shared.messages import Sampling
from motet_tts.qwen2_5_talker_prompt import Qwen25TalkerPrompt
from support.families import omni
from support.running.refusals import refuses
from support.stages.omni_engines import TOKENS, Asked, World, asked, thought

CODES = 24
PICTURE, SOUND = "<|vision_bos|><|IMAGE|><|vision_eos|>", "<|audio_bos|><|AUDIO|><|audio_eos|>"
VIDEO = "<|vision_bos|><|VIDEO|><|vision_eos|>"
PROMPTS = {
    "text": "Hello there.",
    "picture": f"What is in {PICTURE}?",
    "sound": f"What is said in {SOUND}?",
    "video": f"What happens in {VIDEO} and {PICTURE}?",
    "both": f"Compare {PICTURE} with {SOUND} and {PICTURE}.",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.make(omni, tmp_path_factory.mktemp("omni"))


def spoken(world: World, one: Asked) -> list[int]:
    """Have our talker read the states one by one, as many steps as it can between two."""
    prompt = Qwen25TalkerPrompt.load(
        world.folder, {"Chelsie": omni.IDS["<|tts_bos|>"]}, served_as="talker", greedy=True
    )
    count = len(one.prompt)
    known = np.concatenate([part.states_RW.numpy() for part in one.states])
    positions = None
    if one.states[0].positions is not None:
        parts = [part.positions for part in one.states if part.positions is not None]
        positions = np.concatenate(parts, axis=1)[:, :count]
    request = prompt.request("Chelsie", known, count, 0)
    request.sampling.max_tokens = CODES
    first = torch.from_numpy(prompt.states("Chelsie", known[: count + 1], count, ended=False))
    given = GivenStates(first, count, positions)
    codes: list[int] = []

    def step() -> None:
        while world.talker.has_work:
            for output in world.talker.step():
                assert output.error is None
                codes.extend(output.ids)
            world.talker.check_integrity()

    world.talker.add("a", request.prompt, request.sampling, given_states=given)
    step()
    for number in range(count + 2, len(known) + 1):
        assert len(codes) == number - count - 1  # it waits for the state of the next token
        more = torch.from_numpy(known[number - 1 : number])
        world.talker.parts.feeding.feed("a", more, ended=False)
        step()
    last = torch.from_numpy(np.stack([prompt.ends, prompt.pads]))
    world.talker.parts.feeding.feed("a", last, ended=True)
    step()
    return codes


@pytest.mark.parametrize("kind", PROMPTS)
def test_tokens_and_codes_are_those_of_generate(world: World, kind: str) -> None:
    one = asked(world, PROMPTS[kind])
    tokens, codes, ties = omni.generated(world.reference, one.inputs, TOKENS, CODES)
    thought(world, one)
    assert one.ids == tokens
    made = spoken(world, one)
    same = next(
        (n for n, pair in enumerate(zip(made, codes, strict=False)) if len({*pair}) > 1), None
    )
    if same is None:
        assert made == codes
    else:
        assert made[same] in ties[same]
        assert same > 1  # a tie, behind the codes that begin with the reply


def test_a_talker_needs_states_of_its_width(world: World) -> None:
    sampling = Sampling(temperature=0, max_tokens=4)
    with refuses(BadRequest, "input_states"):
        world.talker.add("a", [1, 2, 3], sampling)
    with refuses(BadRequest, "input_states"):
        world.talker.add("a", [1, 2, 3], sampling, given_states=GivenStates(torch.zeros(2, 5), 1))
    with refuses(BadRequest, "input_states"):
        world.thinker.add("a", [1, 2, 3], sampling, given_states=GivenStates(torch.zeros(2, 64), 1))


def test_positions_of_a_video_are_those_of_transformers(world: World) -> None:
    """Frames lie a second apart; text goes on behind the last of them."""
    marks, seconds = omni.IDS, 1.0
    shape = world.thinker.runner.image_shape
    assert shape is not None

    def ids(placeholder: str) -> list[int]:
        video = [marks["<|vision_bos|>"], *[marks[placeholder]] * 12, marks["<|vision_eos|>"]]
        return [1, 2, 3, *video, 4, 5]

    theirs = torch.tensor([ids("<|VIDEO|>")])
    expected, delta = world.reference.thinker.model.get_rope_index(
        theirs,
        video_grid_thw=torch.tensor([[3, 4, 4]]),
        attention_mask=torch.ones_like(theirs),
        second_per_grids=torch.tensor([seconds]),
    )
    rate = world.reference.config.thinker_config.position_id_per_seconds
    video = ImageEmbedding(torch.zeros(1, 12, shape.hidden), "video", (3, 2, 2), rate * seconds)
    ours = ImageEmbeddings(ids("<|IMAGE|>"), [video], shape)
    count = theirs.shape[1]
    assert ours.positions(0, count).tolist() == expected[:, 0].tolist()
    assert ours.positions(count, count + 1)[0, 0] == count + delta.item()
    with refuses(BadRequest, "image_embeddings[0]"):
        ImageEmbeddings(ids("<|AUDIO|>"), [video], shape)
