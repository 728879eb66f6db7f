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
    number of latent frames only.
    """

    frame_rate: float
    odd: bool = False


# By class: those whose frames are compared with diffusers' own.
FAMILIES = {
    "CogVideoXImageToVideoPipeline": VideoFamily(8, odd=True),
    "CogVideoXPipeline": VideoFamily(8, odd=True),
    "LTXImageToVideoPipeline": VideoFamily(25),
    "LTXPipeline": VideoFamily(25),
    "WanPipeline": VideoFamily(16),
}


def makes_videos(folder: Path) -> bool:
    """Return True if a folder's pipeline is one of FAMILIES; False without a readable index."""
    try:
        index = json.loads((folder / "model_index.json").read_text())
    except (OSError, ValueError):  # UnicodeDecodeError is a ValueError
        return False
    return isinstance(index, dict) and index.get("_class_name") in FAMILIES
