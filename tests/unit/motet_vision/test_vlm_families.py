"""Every family that sees: prompts and greedy tokens are those of transformers' processor and `generate`.

With one picture, with several, and with none, in chunks that cut pictures where a model allows it.
One family for each mechanism is in `make test`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.models.image_embeddings import ImageEmbedding
from motet_shared.messages import Sampling
from motet_vision.checkpoint import load_family
from support import processed_vlms
from support.tiers import mostly_long
from support.vlm_checkpoints import picture

TIE = 1e-4
TOLERANCE = 1e-3
SIZES = [(60, 50), (40, 90), (84, 84)]
TOKENS = 8
# A placeholder at a time; pictures that look both ways; deeper layers; axes without deeper layers.
MECHANISMS = ["llava_next", "gemma3", "qwen3_vl_moe"]


@dataclass
class Talk:
    """A prompt with pictures by number, as transformers prepares it, and what came of it."""

    inputs: dict[str, torch.Tensor]
    pictures: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        ids: list[int] = self.inputs["input_ids"][0].tolist()
        return ids


class World:
    """A tiny checkpoint: transformers' processor and model, our pictures and our engine."""

    def __init__(self, name: str, folder: Path):
        self.reference: PreTrainedModel = processed_vlms.write(name, folder)
        self.processor = processed_vlms.reference_processor(folder)
        self.family = load_family(folder, torch.float32)
        prepared = [
            self.family.prepare(picture(number, *size), 0) for number, size in enumerate(SIZES)
        ]
        self.ids = [one.ids for one in prepared]
        self.images = [
            ImageEmbedding(self.family.encode([one])[0], f"picture {number}", one.grid)
            for number, one in enumerate(prepared)
        ]
        self.engine = Engine(
            EngineConfig(
                model=str(folder),
                dtype="float32",
                overlap=False,
                threads=1,
                block_size=4,
                num_blocks=200,
                token_budget=processed_vlms.FAMILIES[name].budget,
                max_running=4,
                context=512,
            )
        )

    def talk(self, *parts: int | str) -> Talk:
        shown = [part for part in parts if isinstance(part, int)]
        text = "".join(
            self.processor.image_token if isinstance(part, int) else part for part in parts
        )
        inputs = dict(
            self.processor(
                images=[[picture(n, *SIZES[n]) for n in shown]] if shown else None,
                text=[text],
                add_special_tokens=False,
                return_tensors="pt",
            )
        )
        inputs.pop("attention_mask", None)
        return Talk(inputs, shown)

    def run(self, talks: list[Talk]) -> None:
        sampling = Sampling(temperature=0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
        for key, talk in enumerate(talks):
            images = [self.images[number] for number in talk.pictures]
            self.engine.add(key, talk.prompt, sampling, images=images)
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.error is None
                talks[output.key].ids += output.ids  # type: ignore[index]
                talks[output.key].logprobs += [  # type: ignore[index]
                    entry.logprob for entry in output.logprobs or []
                ]
            self.engine.check_integrity()

    @torch.inference_mode()
    def assert_greedy(self, talk: Talk) -> None:
        """`talk.ids` is what `generate` gives, ties apart, with its log-probabilities."""
        made = 0
        while made < TOKENS:
            result = self.reference.generate(
                **_with_output(talk.inputs, talk.ids[:made]),
                max_new_tokens=TOKENS - made,
                min_new_tokens=TOKENS - made,
                eos_token_id=1 << 20,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            length = len(talk.prompt) + made
            for step, logits_1V in enumerate(result.logits):
                ours, logits_V = talk.ids[made], logits_1V[0].float()
                assert logits_V.max() - logits_V[ours] < TIE
                assert abs(logits_V.log_softmax(-1)[ours].item() - talk.logprobs[made]) < TOLERANCE
                made += 1
                if ours != result.sequences[0, length + step]:
                    break


def _with_output(inputs: dict[str, Any], output: list[int]) -> dict[str, Any]:
    """Return the inputs of a prompt that ends with `output`, which is text."""
    more = torch.tensor([output], dtype=torch.long)
    return inputs | {
        name: torch.cat((inputs[name], (more if name == "input_ids" else more * 0)), dim=1)
        for name in ("input_ids", "token_type_ids", "mm_token_type_ids")
        if name in inputs
    }


@pytest.mark.parametrize("name", mostly_long(processed_vlms.FAMILIES, MECHANISMS))
def test_pictures_are_seen_as_by_transformers(name: str, tmp_path: Path) -> None:
    world = World(name, tmp_path)
    talks = [
        world.talk("What is in ", 0, " and in ", 1, "?"),
        world.talk(2, "Tell me."),
        world.talk("No picture at all."),
        world.talk("twice: ", 1, " and ", 1, "."),
    ]
    for talk in talks:
        for number in talk.pictures:
            assert _contains(talk.prompt, world.ids[number])
    world.run(talks)
    for talk in talks:
        world.assert_greedy(talk)


def _contains(prompt: list[int], part: list[int]) -> bool:
    return any(
        prompt[start : start + len(part)] == part for start in range(len(prompt) - len(part) + 1)
    )
