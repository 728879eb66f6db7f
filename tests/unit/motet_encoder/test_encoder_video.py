"""Videos: which frames are looked at, that Qwen2.5-VL sees them as transformers has it, and what is refused."""

from __future__ import annotations

from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from motet_encoder.checkpoint import load_family
from motet_encoder.video import Video, open_video
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.models.image_embeddings import ImageEmbedding
from motet_shared.errors import BadRequest, MotetError, PayloadTooLarge, UnsupportedParameter
from motet_shared.messages import Sampling
from support.checkpoints.vlm_checkpoints import picture, reference, tiny_vlm
from support.families import processed_vlms
from support.media.videos import HEIGHT, RATE, WIDTH, random_video
from support.running.refusals import refuses

LIMITS: dict[str, Any] = {"count": 6, "max_pixels": 10_000, "max_length": 100}
TIE = 1e-4
PROCESSORS: dict[str, Any] = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor}


def sound() -> bytes:
    file = BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream: Any = container.add_stream("pcm_s16le", rate=8000)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def decoded(data: bytes) -> list[np.ndarray]:
    container: Any
    with av.open(BytesIO(data)) as container:
        return [
            np.asarray(frame.to_image()) for frame in container.decode(container.streams.video[0])
        ]


@pytest.mark.parametrize(
    ("frames", "wanted"),
    [(30, [0, 6, 12, 17, 23, 29]), (20, [0, 6, 13, 19]), (3, [0, 2]), (1, [0])],
)
def test_frames_are_evenly_spread_and_two_a_second_at_most(frames: int, wanted: list[int]) -> None:
    data = random_video(frames)
    seen, every = open_video(data, **LIMITS), decoded(data)
    assert len(every) == frames
    assert all(
        (np.asarray(one) == every[place]).all()
        for one, place in zip(seen.frames, wanted, strict=True)
    )
    assert seen.fps == pytest.approx(len(wanted) / (frames / RATE))


@pytest.mark.parametrize(
    ("data", "limits", "error"),
    [
        (b"", {}, BadRequest),
        (b"no video at all" * 100, {}, BadRequest),
        (random_video(4)[:300], {}, BadRequest),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hosts\n#EXT-X-ENDLIST\n", {}, BadRequest),
        (sound(), {}, BadRequest),
        (random_video(5), {"max_length": 4}, PayloadTooLarge),
        (random_video(2), {"max_pixels": 100}, PayloadTooLarge),
    ],
)
def test_what_is_no_video_is_named(
    data: bytes, limits: dict[str, int], error: type[MotetError]
) -> None:
    with refuses(error, "x"):
        open_video(data, param="x", **{**LIMITS, **limits})


def test_a_playlist_opens_no_other_file(tmp_path: Path) -> None:
    """FFmpeg's list of files is a format that is probed by nothing but its first line."""
    (tmp_path / "film.mp4").write_bytes(random_video(4))
    playlist = f"ffconcat version 1.0\nfile '{tmp_path / 'film.mp4'}'\n".encode()
    with refuses(BadRequest, "video"):
        open_video(playlist, **LIMITS)


def patches(
    frames: list[Image.Image], patch: int = 14, merge: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """As Qwen2VLVideoProcessor makes them, which cannot be had without torchvision."""
    mean, std = (
        torch.tensor([0.48145466, 0.4578275, 0.40821073]),
        torch.tensor([0.26862954, 0.26130258, 0.27577711]),
    )
    pixels = (
        torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).float() / 255 - mean
    ) / std  # [T, H, W, C]
    pixels = torch.cat([pixels, pixels[-1:].expand(len(pixels) % 2, -1, -1, -1)]).permute(
        0, 3, 1, 2
    )
    steps, rows, columns = len(pixels) // 2, HEIGHT // patch, WIDTH // patch
    shape = (steps, 2, 3, rows // merge, merge, patch, columns // merge, merge, patch)
    laid = pixels.contiguous().view(shape).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return laid.reshape(steps * rows * columns, -1), torch.tensor([[steps, rows, columns]])


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "frames"),
    [
        ("qwen2_5_vl", 40),
        ("qwen3_vl", 25),
        pytest.param("qwen2_5_vl", 25, marks=pytest.mark.long),
        pytest.param("qwen2_vl", 25, marks=pytest.mark.long),
        pytest.param("qwen3_vl_moe", 40, marks=pytest.mark.long),
        pytest.param("qwen3_5", 25, marks=pytest.mark.long),
    ],
)
def test_qwen_sees_a_video_as_transformers_does(name: str, frames: int, tmp_path: Path) -> None:
    if name in processed_vlms.FAMILIES:
        folder, _ = tmp_path, processed_vlms.write(name, tmp_path)
    else:
        folder = tiny_vlm(name, tmp_path)
    model: Any = reference(folder)
    family = load_family(folder, torch.float32)
    shown = open_video(random_video(frames), **{**LIMITS, "count": 5})
    prepared = family.prepare_video(shown, 0)
    values, grid = patches(shown.frames)
    torch.testing.assert_close(prepared.inputs["pixel_values"], values, atol=1e-5, rtol=1e-5)
    assert prepared.inputs["image_grid_thw"].tolist() == grid.tolist()
    (embeddings,) = family.encode([prepared])
    seen = model.model.get_video_features(values, grid)
    deeper = getattr(seen, "deepstack_features", None) or ()
    layers = [torch.cat([*layer]) for layer in (seen.pooler_output, *deeper)]
    torch.testing.assert_close(embeddings, torch.stack(layers), atol=1e-4, rtol=1e-4)

    config = model.config
    before = [*b"What happens in ", config.vision_start_token_id]
    after = [config.vision_end_token_id, *b"? Tell me."]
    engine = Engine(
        EngineConfig(
            model=str(folder),
            block_size=8,
            num_blocks=200,
            token_budget=16,
            max_running=4,
            overlap=False,
            dtype="float32",
        )
    )
    sampling = Sampling(temperature=0, max_tokens=10, ignore_eos=True)
    image_embedding = ImageEmbedding(embeddings, "video", prepared.grid, prepared.interval)
    engine.add(0, before + prepared.ids + after, sampling, images=[image_embedding])
    ids: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            ids += output.ids
    expected = video_ids(name, folder, grid, shown)
    marked = [
        config.video_token_id if token == config.image_token_id else token for token in prepared.ids
    ]
    assert marked == expected
    prompt = torch.tensor([before + expected + after])
    logits = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        pixel_values_videos=values,
        video_grid_thw=grid,
        **({"second_per_grid_ts": torch.tensor([2 / shown.fps])} if name == "qwen2_5_vl" else {}),
        mm_token_type_ids=(prompt == config.video_token_id).int() * 2,
        max_new_tokens=len(ids),
        min_new_tokens=len(ids),
        eos_token_id=1 << 20,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    ).logits
    assert len(ids) == 10
    for ours, logits_1V in zip(ids, logits, strict=True):
        assert logits_1V[0].max() - logits_1V[0][ours] < TIE
        if ours != int(logits_1V[0].argmax()):
            break  # a tie: from here on it is another text


def video_ids(name: str, folder: Path, grid: torch.Tensor, shown: Video) -> list[int]:
    """Return the tokens that transformers' own processor replaces the mark of a video by."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kind = PROCESSORS.get(name, Qwen3VLProcessor)
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(merge_size=2),
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        _calculate_timestamps=partial(Qwen3VLProcessor._calculate_timestamps, None),
    )
    metadata = SimpleNamespace(frames_indices=list(range(len(shown.frames))), fps=shown.fps)
    inputs = {"video_grid_thw": grid, "video_metadata": [metadata]}
    text = kind.replace_video_token(processor, inputs, 0)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llava_siglip", "smolvlm"])
def test_others_see_its_frames_as_pictures(name: str, tmp_path: Path) -> None:
    family = load_family(tiny_vlm(name, tmp_path), torch.float32)
    frames = [picture(number) for number in range(3)]
    together = family.prepare_video(Video(frames, 2.0), 0)
    apart = [family.prepare(frame, 0) for frame in frames]
    assert together.ids == [token for one in apart for token in one.ids]
    beside, (first,) = family.encode([together, apart[1]]), family.encode([apart[0]])
    wanted = torch.cat([first, *(family.encode([one])[0] for one in apart[1:])], dim=1)
    torch.testing.assert_close(beside[0], wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(beside[1], family.encode([apart[1]])[0], atol=1e-4, rtol=1e-4)


def test_who_reads_no_videos_says_so(tmp_path: Path) -> None:
    processed_vlms.write("glm4v", tmp_path)
    family = load_family(tmp_path, torch.float32)
    with refuses(UnsupportedParameter, None):
        family.prepare_video(Video([picture(0), picture(1)], 2.0), 0)
