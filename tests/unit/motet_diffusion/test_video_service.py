"""Test the diffusion service with a model of videos: MP4 files, previews, and what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from motet_media.video_file import VideoWriter
from motet_shared.errors import BadRequest
from motet_shared.messages import VideoForm
from support.checkpoints import diffusion_checkpoints
from support.families import video_families
from support.running.refusals import refuses
from support.stages.diffusion_stage import ask, stage

SIDE, FRAMES, RATE = 32, 9, 16
CODECS: dict[VideoForm, str] = {"mp4": "h264", "webm": "vp9"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return video_families.write("WanPipeline", tmp_path_factory.mktemp("wan") / "model")


@pytest.mark.parametrize(("form", "codec"), CODECS.items())
async def test_a_video_has_its_format_and_length_and_is_the_same_each_time(
    folder: Path, form: VideoForm, codec: str
) -> None:
    asked = ask(format=form, seconds=FRAMES / RATE, width=SIDE, height=SIDE, previews=2, steps=5)
    async with stage(folder) as (caller, actors, _):
        (card,) = actors[0].models()
        assert card.videos
        seen = await caller.draw(asked)
        again = await caller.draw(asked)
        actors[0].check_integrity()
    assert seen.outcome.data == again.outcome.data
    assert (seen.outcome.width, seen.outcome.height, seen.outcome.steps) == (SIDE, SIDE, 5)
    assert seen.outcome.seconds == FRAMES / RATE
    assert [stroke.step for stroke in seen.strokes] == [1, 2, 3, 4, 5]
    assert len(seen.previews) == 2
    assert {Image.open(BytesIO(data)).format for data in seen.previews} == {"WEBP"}
    with av.open(BytesIO(seen.outcome.data), "r") as file:
        video = file.streams.video[0]
        assert (video.codec_context.name, video.average_rate) == (codec, RATE)
        shapes = [frame.to_ndarray(format="rgb24").shape for frame in file.decode(video)]
    assert shapes == [(SIDE, SIDE, 3)] * FRAMES


async def test_a_format_that_the_model_does_not_make_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    pictures = diffusion_checkpoints.stable_diffusion(tmp_path / "model")
    for path, form in ((folder, "png"), (pictures, "mp4")):
        async with stage(path) as (caller, actors, _):
            assert actors[0].models()[0].videos == (path == folder)
            with refuses(BadRequest, "format"):
                await caller.draw(ask(format=form))
            actors[0].check_integrity()


@pytest.mark.parametrize("form", CODECS)
def test_the_frames_of_the_file_are_those_that_were_decoded(form: VideoForm) -> None:
    ramp = np.linspace(0, 255, SIDE * SIDE * 3).astype(np.uint8).reshape(SIDE, SIDE, 3)
    frames = np.stack([np.full_like(ramp, 40 * number) for number in range(6)])
    writer = VideoWriter(frame_rate=23.976, form=form)
    writer.add(frames[:1])
    writer.add(frames[1:])
    with av.open(BytesIO(writer.finish()), "r") as file:
        video = file.streams.video[0]
        assert round(float(video.average_rate or 0), 3) == 23.976
        read = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video)])
    assert writer.frames == len(read) == 6
    assert np.abs(read.astype(int) - frames).max() <= 4


@pytest.mark.parametrize("form", CODECS)
def test_the_same_frames_give_the_same_bytes_on_any_thread(form: VideoForm) -> None:
    frames = np.random.default_rng(0).normal(128, 19, (9, 32, 32, 3)).clip(0, 255).astype(np.uint8)

    def encode() -> bytes:
        writer = VideoWriter(frame_rate=16, form=form)
        writer.add(frames)
        return writer.finish()

    files = set()
    for _ in range(12):
        with ThreadPoolExecutor(1) as fresh:
            files.add(fresh.submit(encode).result())
    assert len(files) == 1
