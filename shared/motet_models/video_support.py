"""Determine from model_index.json whether a folder of diffusers makes videos.

The diffusion service and the command line share this decision.
"""

from __future__ import annotations

import json
from pathlib import Path

# Pipelines whose frames are compared with diffusers' own.
PIPELINES = frozenset(
    """CogVideoXImageToVideoPipeline CogVideoXPipeline LTXImageToVideoPipeline LTXPipeline
    WanPipeline""".split()
)


def makes_videos(folder: Path) -> bool:
    """Return True if a folder's pipeline is one of PIPELINES; False without a readable index."""
    try:
        index = json.loads((folder / "model_index.json").read_text())
    except (OSError, ValueError):  # UnicodeDecodeError is a ValueError
        return False
    return isinstance(index, dict) and index.get("_class_name") in PIPELINES
