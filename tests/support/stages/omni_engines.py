"""Have the stages of an omni model answer at engines of their own, beside transformers' model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from motet_encoder.checkpoint import load_family
from motet_encoder.families import Prepared
from motet_encoder.video import Video
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.models.image_embeddings import ImageEmbedding
from motet_llm.stages.states import SentStates
from motet_shared.messages import Sampling
from support.checkpoints.vlm_checkpoints import picture
from support.families import processed_vlms
from support.families.hearing import RATE, recording

TOKENS = 8
FPS = 1.0  # of a video


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
    prompt: list[int]
    states: list[SentStates] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


def engine(folder: Path, stage: Any, **options: Any) -> Engine:
    fixed: dict[str, Any] = {"dtype": "float32", "overlap": False, "threads": 1, "stage": stage}
    sizes = {"block_size": 4, "num_blocks": 300, "max_running": 4, "token_budget": 7}
    return Engine(EngineConfig(model=str(folder), **{**fixed, **sizes, **options}))


def asked(world: World, text: str) -> Asked:
    """Return a prompt with a picture, a recording or a video at each mark, by our encoder.

    transformers' processor of videos needs torchvision: it gets the patches and the grid of ours.
    """
    marks = world.family.MARKS
    processor = processed_vlms.reference_processor(world.folder)
    pictures: list[Any] = []
    sounds: list[Any] = []
    videos: list[Prepared] = []
    images: list[ImageEmbedding] = []
    for mark in (f"<|{part.split('|>')[0]}|>" for part in text.split("<|")[1:]):
        if mark == marks["image_token"]:
            pictures.append(picture(len(pictures)))
            prepared = world.encoder.prepare(pictures[-1], 0)
        elif mark == marks["audio_token"]:
            sounds.append(recording(1, 0.8))
            prepared = world.encoder.prepare_sound(sounds[-1], RATE)
        elif mark == marks["video_token"]:
            frames = [picture(number) for number in range(4)]
            prepared = world.encoder.prepare_video(Video(frames, FPS), 0)
            videos.append(prepared)
        else:
            continue
        found = world.encoder.encode([prepared])[0]
        name = f"medium {len(images)}"
        images.append(ImageEmbedding(found, name, prepared.grid, prepared.interval))
    media: dict[str, Any] = {"images": pictures} if pictures else {}
    if sounds:
        media |= {"audio": sounds, "audio_kwargs": {"sampling_rate": RATE}}
    blank = world.family.SPEECH[-1]  # of no prompt
    text = text.replace(marks["video_token"], blank)
    inputs = dict(processor(text=[text], **media, add_special_tokens=False, return_tensors="pt"))
    video, image = (world.family.IDS[marks[name]] for name in ("video_token", "image_token"))
    ids: list[int] = inputs["input_ids"][0].tolist()
    for prepared in videos:
        place = ids.index(world.family.IDS[blank])
        ids[place : place + 1] = [video] * len(prepared.ids)
    if videos:
        inputs["input_ids"] = torch.tensor([ids])
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs |= _of_videos(world, videos)
    return Asked(inputs, images, [image if token == video else token for token in ids])


def _of_videos(world: World, videos: list[Prepared]) -> dict[str, torch.Tensor]:
    """Return what transformers' model takes of videos."""
    config = world.reference.config.thinker_config
    seconds = [one.interval / config.position_id_per_seconds for one in videos]
    return {
        "pixel_values_videos": torch.cat([one.inputs["pixel_values"] for one in videos]),
        "video_grid_thw": torch.cat([one.inputs["image_grid_thw"] for one in videos]),
        "video_second_per_grid": torch.tensor(seconds),
    }


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
