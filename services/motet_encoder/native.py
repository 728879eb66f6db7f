"""Encode pictures in their own resolution: Qwen2-VL to Qwen3.5; tokens follow from patches."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from motet_kernels.spans import upload
from motet_shared.errors import UnsupportedParameter

from .families import EncoderFamily, Prepared
from .processors import processor_class
from .video import Video

_TEMPORAL_PATCH = 2  # frames that a patch of a video spans


class NativeResolution(EncoderFamily):
    """Encode with a token per square of merged patches; Qwen3-VL adds deeper layers."""

    def __init__(self, model: PreTrainedModel, processor: Any, tokenizer: Any):
        super().__init__(model, processor, tokenizer)
        self._merge: int = processor.merge_size
        self._least, self._most = (
            int(processor.size["shortest_edge"]),
            int(processor.size["longest_edge"]),
        )
        config = model.config
        # Models whose processor gives times have these marks around each pair of frames.
        self._timed = (
            (config.vision_start_token_id, config.vision_end_token_id)
            if hasattr(processor_class(config), "_calculate_timestamps")
            else None
        )

    def prepare(self, picture: Image.Image, max_pixels: int) -> Prepared:
        max_size = max(self._least, min(max_pixels or self._most, self._most))
        size = {"shortest_edge": self._least, "longest_edge": max_size}
        processed = self.processor(images=[picture], size=size, return_tensors="pt")
        frames, rows, columns = processed["image_grid_thw"][0].tolist()
        grid = (frames, rows // self._merge, columns // self._merge)
        inputs = {name: processed[name] for name in ("pixel_values", "image_grid_thw")}
        ids = [self.placeholder] * (grid[0] * grid[1] * grid[2])
        return Prepared(inputs, frames * rows * columns, "any size", ids, grid)

    def prepare_video(self, video: Video, max_pixels: int) -> Prepared:
        """Prepare a video: patches span two frames.

        The processor makes patches of each frame as of a picture, that is, of the frame twice; half
        of each is taken. Raises UnsupportedParameter for a model with other patches.
        """
        vision = self.model.config.vision_config
        if vision.temporal_patch_size != _TEMPORAL_PATCH:
            message = f"a {self.model.config.model_type} reads no videos; send frames as images"
            raise UnsupportedParameter(message)
        frames_read = [*video.frames, *video.frames[-1:] * (len(video.frames) % _TEMPORAL_PATCH)]
        frames = [self.prepare(frame, max_pixels) for frame in frames_read]
        shape = (-1, _TEMPORAL_PATCH, vision.patch_size**2)  # channels, frames, pixels
        halves = [frame.inputs["pixel_values"].unflatten(1, shape)[:, :, 0] for frame in frames]
        pairs = [
            torch.stack(pair, 2).flatten(1)
            for pair in zip(halves[::_TEMPORAL_PATCH], halves[1::_TEMPORAL_PATCH], strict=True)
        ]
        _, rows, columns = frames[0].grid
        steps = len(pairs)
        grid = torch.tensor([[steps, rows * self._merge, columns * self._merge]])
        inputs = {"pixel_values": torch.cat(pairs), "image_grid_thw": grid}
        patches = steps * rows * columns * self._merge**2
        ids, interval = self._video_tokens(frames[0].ids, steps, video)
        return Prepared(inputs, patches, "any size", ids, (steps, rows, columns), interval)

    def _video_tokens(self, frame: list[int], steps: int, video: Video) -> tuple[list[int], float]:
        """Return the tokens of a video of `steps` pairs of frames, and positions between pairs.

        Qwen2-VL counts pairs, Qwen2.5-VL and Qwen2.5-Omni seconds. Later models read a frame's time as text before
        it, and see the tokens of each pair as a picture.
        """
        config = self.model.config
        per_second = getattr(config, "position_id_per_seconds", None)  # Qwen2.5-Omni's name
        if per_second or hasattr(config.vision_config, "tokens_per_second"):
            seconds = _TEMPORAL_PATCH / video.fps
            return frame * steps, (per_second or config.vision_config.tokens_per_second) * seconds
        if self._timed is None:
            return frame * steps, 1.0
        ids: list[int] = []
        for first in range(0, steps * _TEMPORAL_PATCH, _TEMPORAL_PATCH):
            last = min(first + _TEMPORAL_PATCH, len(video.frames)) - 1
            time = (first / video.fps + last / video.fps) / 2
            text = self.tokenizer.backend_tokenizer.encode(
                f"<{time:.1f} seconds>", add_special_tokens=False
            )
            ids += [*text.ids, self._timed[0], *frame, self._timed[1]]
        return ids, 1.0

    def _moved(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """Compute positions, windows and bounds from the grids, so that nothing waits for the GPU.

        Grids and bounds stay on the CPU, where they are read.
        """
        grids, tower = inputs["image_grid_thw"], self.model.visual
        known: dict[str, Tensor] = {"position_ids": get_vision_position_ids(grids, self._merge)}
        starts = {"cu_seqlens": get_vision_cu_seqlens(grids)}
        if hasattr(tower, "window_size"):
            sizes = {"window_size": tower.window_size, "patch_size": tower.patch_size}
            known["window_index"], starts["cu_window_seqlens"] = get_vision_window_index(
                grids, self._merge, **sizes
            )
        if hasattr(tower, "num_grid_per_side"):
            known["interp_indices"], known["interp_weights"] = (
                get_vision_interpolation_indices_and_weights(
                    grids,
                    num_grid_per_side=tower.num_grid_per_side,
                    mode=tower.interpolation_mode,
                    align_corners=tower.interpolation_align_corners,
                    spatial_merge_size=self._merge,
                )
            )
        moved = {name: upload(part, self.device) for name, part in known.items()}
        pixels = self._uploaded(inputs["pixel_values"])
        return {"pixel_values": pixels, "image_grid_thw": grids, **moved, **starts}
