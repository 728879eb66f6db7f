"""Prompts with pictures: greedy tokens equal `transformers.generate`, whatever happens to a request on the way.

Chunks that cut pictures, small pools (preemptions, blocks that go to the host and come back), prefix hits, moves from
one engine to another with output already made, several pictures in a prompt. Where the reference's two best logits
differ by less than 1e-4 either token is right, and the reference goes on from ours.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, PreTrainedModel

from motet_encoder.checkpoint import load_family
from motet_encoder.families import EncoderFamily
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.models.image_embeddings import ImageEmbedding
from motet_shared.errors import BadRequest
from motet_shared.messages import Sampling
from support.checkpoints.vlm_checkpoints import FAMILIES, picture, reference, tiny_vlm
from support.running.refusals import refuses

TIE = 1e-4
TOLERANCE = 1e-3
SIZES = [(60, 50), (40, 90), (84, 84)]
EOS_FREE = 1 << 20


@dataclass
class Talk:
    """A prompt with pictures (by number), and what came of it."""

    prompt: list[int]
    pictures: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    done: bool = False


class World:
    """A family's tiny checkpoint: its pictures, seen, and two engines for it."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder
        self.reference: PreTrainedModel = reference(folder)
        self.family: EncoderFamily = load_family(folder, torch.float32)
        prepared = [
            self.family.prepare(picture(number, *size), 0) for number, size in enumerate(SIZES)
        ]
        self.ids = [one.ids for one in prepared]
        self.image_embeddings = [
            ImageEmbedding(self.family.encode([one])[0], f"picture {number}", one.grid)
            for number, one in enumerate(prepared)
        ]

    def engine(self, **settings: Any) -> Engine:
        sizes = {"block_size": 8, "num_blocks": 200, "token_budget": 64, "max_running": 4}
        return Engine(EngineConfig(model=str(self.folder), overlap=False, **{**sizes, **settings}))

    def talk(self, *parts: int | str) -> Talk:
        """Of texts and pictures by number."""
        talk = Talk([], [])
        for part in parts:
            if isinstance(part, str):
                talk.prompt += part.encode()
            else:
                talk.prompt += self.ids[part]
                talk.pictures.append(part)
        return talk

    def add(self, engine: Engine, key: int, talk: Talk, max_tokens: int = 10) -> None:
        sampling = Sampling(temperature=0, max_tokens=max_tokens, logprobs=0, ignore_eos=True)
        image_embeddings = [self.image_embeddings[number] for number in talk.pictures]
        engine.add(key, talk.prompt, sampling, output=talk.ids, images=image_embeddings)

    def inputs(self, talk: Talk) -> dict[str, Any]:
        """What transformers makes of the pictures."""
        if not talk.pictures:
            return {}
        processor = AutoImageProcessor.from_pretrained(self.folder)
        shown = [picture(number, *SIZES[number]) for number in talk.pictures]
        tiled = self.name in ("smolvlm", "idefics3")
        return dict(processor([shown] if tiled else shown, return_tensors="pt"))

    @torch.inference_mode()
    def assert_greedy(self, talk: Talk) -> None:
        """`talk.ids` is what `generate` gives, ties apart, and its log-probabilities are the reference's."""
        pictures, made = self.inputs(talk), 0
        while made < len(talk.ids):
            prompt = torch.tensor([talk.prompt + talk.ids[:made]])
            axes = (
                {"mm_token_type_ids": (prompt == self.family.placeholder).int()}
                if self.image_embeddings[0].grid
                else {}
            )
            result = self.reference.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=len(talk.ids) - made,
                min_new_tokens=len(talk.ids) - made,
                eos_token_id=EOS_FREE,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                **pictures,
                **axes,
            )
            for step, logits_1V in enumerate(result.logits):
                ours, logits_V = talk.ids[made], logits_1V[0]
                assert logits_V.max() - logits_V[ours] < TIE
                assert abs(logits_V.log_softmax(-1)[ours].item() - talk.logprobs[made]) < TOLERANCE
                made += 1
                if ours != result.sequences[0, prompt.shape[1] + step]:
                    break


def run(engine: Engine, talks: dict[int, Talk], steps: int = EOS_FREE) -> None:
    """So many steps, or until there is nothing to do."""
    while engine.has_work and steps:
        for output in engine.step():
            assert output.error is None
            talk = talks[output.key]  # type: ignore[index]
            talk.ids += output.ids
            talk.logprobs += [entry.logprob for entry in output.logprobs or []]
            talk.done = output.finish is not None
            talk.cached = output.usage.cached_tokens if output.usage else 0
        engine.check_integrity()
        steps -= 1


@pytest.fixture(scope="module", params=list(FAMILIES))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(request.param, tiny_vlm(request.param, tmp_path_factory.mktemp(request.param)))


def test_chunks_may_cut_pictures(world: World) -> None:
    talks = {
        0: world.talk("What is in ", 0, " and in ", 1, "?"),
        1: world.talk(2, "Tell me."),
        2: world.talk("No picture at all."),
        3: world.talk("twice: ", 1, 1, "."),
    }
    if world.image_embeddings[0].grid:  # Qwen's pictures always stand between marks
        talks[3] = world.talk("twice: ", 1, "<>", 1, ".")
    engine = world.engine(token_budget=7)
    for key, talk in talks.items():
        world.add(engine, key, talk)
        run(engine, talks, steps=2)
    run(engine, talks)
    for talk in talks.values():
        assert talk.done
        world.assert_greedy(talk)
    assert engine.stats()["blocks_free"] == engine.stats()["blocks_total"]


def test_preempted_and_offloaded(world: World) -> None:
    talks = {key: world.talk("Look: ", key % 3, f" number {key}") for key in range(6)}
    longest = max(len(talk.prompt) for talk in talks.values()) + 20
    engine = world.engine(num_blocks=-(-longest // 8) + 3, token_budget=16, host_cache=1 << 20)
    rng = random.Random(3)
    for key, talk in talks.items():
        world.add(engine, key, talk, max_tokens=rng.randint(8, 18))
    run(engine, talks)
    assert engine.stats()["preemptions"] > 0
    for talk in talks.values():
        world.assert_greedy(talk)


def test_prefix_hits_know_pictures_apart(world: World) -> None:
    engine = world.engine()
    text = "The same words before, "
    first, same, other = (world.talk(text, number, " and after.") for number in (0, 0, 1))
    other_size = len(world.ids[1]) == len(world.ids[0])
    for key, talk in enumerate((first, same, other)):
        world.add(engine, key, talk)
        run(engine, {key: talk})
        world.assert_greedy(talk)
    assert same.cached == len(same.prompt) - 1
    # Marks that stand before the first placeholder are the same in both.
    marks = world.ids[1].index(world.family.placeholder)
    assert other.cached <= len(text) + marks
    assert other.ids != first.ids or not other_size
    longer = world.talk(text, 0, " and after. And what about ", 1, "?")
    world.add(engine, 9, longer)
    run(engine, {9: longer})
    world.assert_greedy(longer)
    assert longer.cached >= len(first.prompt) - 8


def test_moved_with_output(world: World) -> None:
    talk = world.talk("Move ", 2, " please")
    first, second = world.engine(token_budget=9), world.engine(token_budget=5)
    world.add(first, 0, talk)
    while len(talk.ids) < 4:
        run(first, {0: talk}, steps=1)
    first.cancel(0)
    first.check_integrity()
    world.add(second, 0, talk)
    run(second, {0: talk})
    assert talk.done
    world.assert_greedy(talk)


def test_what_does_not_fit_is_refused(world: World) -> None:
    engine = world.engine()
    sampling = Sampling(max_tokens=1)
    whole, placeholder = world.image_embeddings[0], world.family.placeholder
    with refuses(BadRequest, "prompt"):
        engine.add(0, [1, placeholder, 2], sampling)
    with refuses(BadRequest, "prompt"):
        engine.add(0, [1, 2], sampling, images=[whole])
    cut = ImageEmbedding(whole.embeddings_LTX[:, :, :5], "cut", whole.grid)
    with refuses(BadRequest, "image_embeddings[0]"):
        engine.add(0, [1, *world.ids[0]], sampling, images=[cut])
    if whole.grid:
        with refuses(BadRequest, "image_embeddings[0]"):
            engine.add(
                0,
                [1, *world.ids[0]],
                sampling,
                images=[ImageEmbedding(whole.embeddings_LTX, "flat", (1, 1, 1))],
            )
    assert not engine.has_work
    engine.check_integrity()


def test_a_model_without_eyes_says_so(tmp_path: Path) -> None:
    from support.checkpoints.language_checkpoints import tiny_checkpoint

    engine = Engine(
        EngineConfig(model=str(tiny_checkpoint("llama", tmp_path)), num_blocks=8, overlap=False)
    )
    with refuses(BadRequest, "image_embeddings"):
        engine.add(0, [1], Sampling(), images=[ImageEmbedding(torch.zeros(1, 1, 64), "x")])
