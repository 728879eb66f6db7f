"""Know the pipelines of diffusers that make videos, by the class in model_index.json.

The diffusion service and the command line share this table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class VideoFamily(NamedTuple):
    """Hold what a family's classes do not declare.

    frame_rate: frames per second that it is trained on. odd: its VAE keeps the length of an odd
    number of latent frames only. sound: its pipeline returns sound beside the frames, whose latents
    a copy of its scheduler denoises.
    """

    frame_rate: float
    odd: bool = False
    sound: bool = False


# By class: those whose frames are compared with diffusers' own.
FAMILIES = {
    "CogVideoXImageToVideoPipeline": VideoFamily(8, odd=True),
    "CogVideoXPipeline": VideoFamily(8, odd=True),
    "HunyuanVideo15ImageToVideoPipeline": VideoFamily(24),
    "HunyuanVideo15Pipeline": VideoFamily(24),
    "HunyuanVideoPipeline": VideoFamily(24),
    "LTX2ImageToVideoPipeline": VideoFamily(24, sound=True),
    "LTX2Pipeline": VideoFamily(24, sound=True),
    "LTXConditionPipeline": VideoFamily(25),
    "LTXImageToVideoPipeline": VideoFamily(25),
    "LTXPipeline": VideoFamily(25),
    "WanImageToVideoPipeline": VideoFamily(16),
    "WanPipeline": VideoFamily(16),
}


def makes_videos(folder: Path) -> bool:
    """Return True if a folder's pipeline is one of FAMILIES; False without a readable index."""
    try:
        index = json.loads((folder / "model_index.json").read_text())
    except (OSError, ValueError):  # UnicodeDecodeError is a ValueError
        return False
    return isinstance(index, dict) and index.get("_class_name") in FAMILIES
