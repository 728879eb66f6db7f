"""Have the stages of an omni model answer at engines of their own, beside transformers' model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from motet_encoder.checkpoint import load_family
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.models.image_embeddings import ImageEmbedding
from motet_llm.stages.states import SentStates
from motet_shared.messages import Sampling
from support.checkpoints.vlm_checkpoints import picture
from support.families import processed_vlms
from support.families.hearing import RATE, recording

TOKENS = 8


@dataclass
class World:
    """A checkpoint of `family`, a module with `write` and `MARKS`."""

    family: ModuleType
    folder: Path
    reference: Any
    encoder: Any
    thinker: Engine
    talker: Engine

    @classmethod
    def make(cls, family: ModuleType, folder: Path) -> World:
        return cls(
            family,
            folder,
            family.write(folder),
            load_family(folder, torch.float32),
            engine(folder, "thinker"),
            engine(folder, "talker"),
        )


@dataclass
class Asked:
    """A prompt as transformers prepares it, and as we do."""

    inputs: dict[str, torch.Tensor]
    images: list[ImageEmbedding]
    states: list[SentStates] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        ids: list[int] = self.inputs["input_ids"][0].tolist()
        return ids


def engine(folder: Path, stage: Any, **options: Any) -> Engine:
    fixed: dict[str, Any] = {"dtype": "float32", "overlap": False, "threads": 1, "stage": stage}
    sizes = {"block_size": 4, "num_blocks": 300, "max_running": 4, "token_budget": 7}
    return Engine(EngineConfig(model=str(folder), **{**fixed, **sizes, **options}))


def asked(world: World, text: str) -> Asked:
    """Return a prompt with a picture or a recording at each mark, by our encoder."""
    marks = world.family.MARKS
    processor = processed_vlms.reference_processor(world.folder)
    pictures: list[Any] = []
    sounds: list[Any] = []
    images: list[ImageEmbedding] = []
    for mark in (f"<|{part.split('|>')[0]}|>" for part in text.split("<|")[1:]):
        if mark == marks["image_token"]:
            pictures.append(picture(len(pictures)))
            prepared = world.encoder.prepare(pictures[-1], 0)
        elif mark == marks["audio_token"]:
            sounds.append(recording(1, 0.8))
            prepared = world.encoder.prepare_sound(sounds[-1], RATE)
        else:
            continue
        found = world.encoder.encode([prepared])[0]
        name = f"medium {len(images)}"
        images.append(ImageEmbedding(found, name, prepared.grid, prepared.interval))
    media: dict[str, Any] = {"images": pictures} if pictures else {}
    if sounds:
        media |= {"audio": sounds, "audio_kwargs": {"sampling_rate": RATE}}
    inputs = dict(processor(text=[text], **media, add_special_tokens=False, return_tensors="pt"))
    return Asked(inputs, images)


def thought(world: World, one: Asked) -> None:
    """Have our thinker answer."""
    sampling = Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    world.thinker.add("a", one.prompt, sampling, images=one.images, sends_states=True)
    while world.thinker.has_work:
        for output in world.thinker.step():
            assert output.error is None
            one.ids += output.ids
            if output.states is not None:
                one.states.append(output.states)
        world.thinker.check_integrity()
