"""The stages of Qwen3-Omni compute what transformers' `generate` computes: tokens, and frames of codes.

Thinker and talker are engines of their own, over prompts of text, pictures and sound. The talker gets
states as the thinker computes them, one by one, and has its code predictor complete each frame.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from motet_llm.engine.engine import Engine
from motet_llm.engine.memory_budget import expected_weight_bytes
from motet_llm.models.image_embeddings import ImageEmbedding, ImageEmbeddings
from motet_llm.stages.states import GivenStates
from motet_llm.stages.transport import split_frames
from motet_models.model_config import model_shape, read_config
from motet_models.omni import Stage
from motet_shared.errors import BadRequest
from motet_shared.messages import Sampling
from motet_tts.qwen3_talker_prompt import Qwen3TalkerPrompt
from support.families import qwen3_omni as omni
from support.running.refusals import refuses
from support.stages.omni_engines import TOKENS, Asked, World, asked, engine, thought

FRAMES = 16
PICTURE, SOUND = omni.MEDIA["image"], omni.MEDIA["audio"]
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def chat(*turns: tuple[str, str]) -> str:
    """Return the prompt of a chat's turns, each a role and what is said."""
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
    return text + "<|im_start|>assistant\n"


PROMPTS = {
    "turns": chat(
        ("system", "Be kind."),
        ("user", f"What is in {PICTURE}?"),
        ("assistant", "A cat."),
        ("user", f"And said in {SOUND} of {PICTURE}?"),
    ),
    "sound": chat(("system", "Be kind."), ("user", f"What is said in {SOUND}?")),
    "video": chat(("user", f"What happens in {VIDEO}, and whose voice is {SOUND}?")),
    "text": chat(("user", "Hello there.")),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.make(omni, tmp_path_factory.mktemp("omni"))


class Speaking:
    """A reply that our talker speaks, in one go or at a second engine from some frame on."""

    def __init__(self, world: World, one: Asked, **sampling: Any):
        self.prompt = Qwen3TalkerPrompt.load(world.folder, served_as="talker", greedy=True)
        self.count = len(one.prompt)
        self.known = np.concatenate([part.states_RW.numpy() for part in one.states])
        self.positions = None
        if one.states[0].positions is not None:
            parts = [part.positions for part in one.states if part.positions is not None]
            joined = np.concatenate(parts, axis=1)[:, : self.count]
            self.positions = self.prompt.positions(joined, self.known)
        self.request = self.prompt.request("ethan", self.known, self.count, 3)
        self.request.sampling.max_tokens = FRAMES
        for name, value in sampling.items():
            setattr(self.request.sampling, name, value)
        self.frames: list[list[int]] = []

    def states(self, upto: int, *, ended: bool = False) -> torch.Tensor:
        found = self.prompt.states("ethan", self.known[:upto], self.count, ended=ended)
        return torch.from_numpy(found)

    def begin(self, talker: Engine, states: torch.Tensor, *, ended: bool = False) -> None:
        ids = [code for frame in self.frames for code in frame]
        output, codes = split_frames(ids, omni.GROUPS)
        given = GivenStates(states, self.request.replaced, self.positions, ended, codes)
        talker.add(
            "a", self.request.prompt, self.request.sampling, output=output, given_states=given
        )

    def step(self, talker: Engine, upto: int = FRAMES) -> None:
        while talker.has_work and len(self.frames) < upto:
            for output in talker.step():
                assert output.error is None
                if output.ids:
                    self.frames.append([*output.ids, *(output.codes or ())])
            talker.check_integrity()


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", PROMPTS)
def test_tokens_and_codes_are_those_of_generate(world: World, kind: str) -> None:
    one = asked(world, PROMPTS[kind])
    tokens, frames = omni.generated(world.reference, one.inputs, TOKENS, FRAMES + 1)
    thought(world, one)
    assert one.ids == tokens
    said = Speaking(world, one)
    said.begin(world.talker, said.states(said.count + 1))
    said.step(world.talker)
    for number in range(said.count + 2, len(said.known) + 1):
        assert len(said.frames) == number - said.count - 1  # it waits for the next token's state
        world.talker.parts.feeding.feed("a", said.states(number)[-1:], ended=False)
        said.step(world.talker)
    world.talker.parts.feeding.feed("a", said.states(number, ended=True)[-2:], ended=True)
    said.step(world.talker)
    assert said.frames == frames[: len(said.frames)]
    assert len(said.frames) == min(FRAMES, len(frames))


@pytest.mark.long
def test_frames_that_are_drawn_go_on_at_another_talker(world: World) -> None:
    """Noise depends on seed, frame and group alone; two replies share the predictor's steps."""
    one = asked(world, PROMPTS["text"])
    thought(world, one)
    whole = Speaking(world, one, temperature=0.9, seed=11)
    states = whole.states(len(whole.known), ended=True)
    whole.begin(world.talker, states, ended=True)
    whole.step(world.talker)
    assert len({tuple(frame) for frame in whole.frames}) > 1
    moved = Speaking(world, one, temperature=0.9, seed=11)
    moved.begin(world.talker, states, ended=True)
    moved.step(world.talker, upto=5)
    world.talker.cancel("a")
    moved.begin(world.talker, states, ended=True)
    moved.step(world.talker)
    assert moved.frames == whole.frames


@pytest.mark.long
def test_frames_survive_a_preemption(world: World) -> None:
    """Codes that were computed are read again, not drawn again."""
    one = asked(world, PROMPTS["text"])
    thought(world, one)
    alone = Speaking(world, one)
    states = alone.states(len(alone.known), ended=True)
    alone.begin(world.talker, states, ended=True)
    alone.step(world.talker)
    small = engine(world.folder, "talker", num_blocks=16, prefix_cache=False)
    found: dict[Any, list[list[int]]] = {"a": [], "b": []}
    for key in found:
        given = GivenStates(states, alone.request.replaced, alone.positions, ended=True)
        small.add(key, alone.request.prompt, alone.request.sampling, given_states=given)
    while small.has_work:
        for output in small.step():
            assert output.error is None
            if output.ids:
                found[output.key].append([*output.ids, *(output.codes or ())])
        small.check_integrity()
    assert small.stats()["preemptions"]
    assert found == {"a": alone.frames, "b": alone.frames}


def test_positions_of_a_video_are_those_of_transformers(world: World) -> None:
    """Frames lie two seconds apart; the talker's positions leave out what is not of users."""
    marks, rate = omni.IDS, world.reference.config.thinker_config.position_id_per_seconds
    shape = world.thinker.runner.image_shape
    assert shape is not None

    def ids(placeholder: str, *before: int) -> list[int]:
        video = [marks["<|vision_start|>"], *[marks[placeholder]] * 12, marks["<|vision_end|>"]]
        turn = [omni.START, marks["user"], 10, *video, 4, 5]
        return [*before, *turn]

    def theirs(prompt: list[int]) -> Any:
        given = torch.tensor([prompt])
        found, _ = world.reference.thinker.model.get_rope_index(
            given,
            video_grid_thw=torch.tensor([[3, 4, 4]]),
            attention_mask=torch.ones_like(given),
            second_per_grids=torch.tensor([2.0]),
        )
        return found[:, 0].tolist()

    system = [omni.START, marks["system"], 10, 7, 8, 9]
    prompt = ids("<|image_pad|>", *system)
    embeddings = torch.zeros(shape.layers, 12, shape.hidden)
    video = ImageEmbedding(embeddings, "video", (3, 2, 2), rate * 2.0)
    ours = ImageEmbeddings(prompt, [video], shape).positions(0, len(prompt))
    assert ours.tolist() == theirs(ids("<|video_pad|>", *system))
    states = np.zeros((len(prompt), 65), np.float32)
    states[:, -1] = prompt
    talker = Qwen3TalkerPrompt.load(world.folder, served_as="talker", greedy=True)
    assert talker.positions(ours, states).tolist() == theirs(ids("<|video_pad|>"))


def test_the_memory_of_a_stage_is_that_of_its_tensors(world: World) -> None:
    """Up to the padding of packed matrices."""
    stages: list[tuple[Engine, Stage]] = [(world.thinker, "thinker"), (world.talker, "talker")]
    for one, stage in stages:
        found = expected_weight_bytes(world.folder, "float32", False, stage)
        assert found == pytest.approx(one.runner.weight_bytes, rel=0.06)
    counted = model_shape(read_config(world.folder)).parameters.total * 4
    assert counted == pytest.approx(world.thinker.runner.weight_bytes, rel=0.06)


def test_half_a_frame_is_refused(world: World) -> None:
    with refuses(BadRequest, "output"):
        split_frames([1, 2, 3], omni.GROUPS)
    given = GivenStates(torch.zeros(3, 65), 1)
    with refuses(BadRequest, "output"):
        world.talker.add("a", [1, 2], Sampling(max_tokens=4), output=[1], given_states=given)
