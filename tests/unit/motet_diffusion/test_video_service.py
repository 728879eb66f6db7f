"""Test the diffusion service with a model of videos: MP4 files, previews, and what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray
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


@pytest.mark.long
@pytest.mark.parametrize("form", CODECS)
async def test_a_video_of_ltx_2_has_its_sound(tmp_path: Path, form: VideoForm) -> None:
    folder = video_families.write("LTX2Pipeline", tmp_path / "model")
    asked = ask(format=form, seconds=17 / 24, width=64, height=64, steps=2)
    async with stage(folder) as (caller, actors, _):
        seen = await caller.draw(asked)
        again = await caller.draw(asked)
        actors[0].check_integrity()
    assert seen.outcome.data == again.outcome.data
    frames, sound = read(seen.outcome.data)
    assert frames == 17
    assert sound.shape[0] == 2
    assert sound.std() > 1e-4


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
@pytest.mark.parametrize(("rate", "channels"), [(24_000, 2), (16_000, 1)])
def test_the_sound_of_the_file_is_that_which_was_given(
    form: VideoForm, rate: int, channels: int
) -> None:
    """A tone of 440 Hz on the left, or on both sides; the frames may end before it."""
    times = np.arange(rate) / rate
    tone = 0.5 * np.sin(2 * np.pi * 440 * times)
    samples = np.stack([tone, 0 * tone][:channels]).astype(np.float32)
    files = []
    for _ in range(2):
        writer = VideoWriter(frame_rate=16, form=form, sound_rate=rate)
        writer.add(np.zeros((4, 32, 32, 3), np.uint8))
        writer.add(np.zeros((8, 32, 32, 3), np.uint8))
        writer.add_sound(samples)
        files.append(writer.finish())
    assert files[0] == files[1]
    frames, sound = read(files[0])
    assert frames == 12
    with av.open(BytesIO(files[0]), "r") as file:
        heard_rate = file.streams.audio[0].rate
        assert file.streams.audio[0].codec_context.name == {"mp4": "aac", "webm": "opus"}[form]
    assert sound.shape[1] == pytest.approx(heard_rate, rel=0.1)
    inner = sound[:, heard_rate // 4 : heard_rate * 3 // 4]
    spectrum = np.abs(np.fft.rfft(inner[0]))
    assert spectrum.argmax() * heard_rate / inner.shape[1] == pytest.approx(440, abs=4)
    assert inner[0].std() == pytest.approx(0.5 / np.sqrt(2), rel=0.05)
    assert inner[1].std() == pytest.approx(0 if channels == 2 else inner[0].std(), abs=0.01)


def read(data: bytes) -> tuple[int, NDArray[np.float32]]:
    """Return the number of frames of a file, and its sound `[channels, samples]`."""
    with av.open(BytesIO(data), "r") as file:
        frames = len(list(file.decode(video=0)))
    with av.open(BytesIO(data), "r") as file:
        return frames, np.concatenate([f.to_ndarray() for f in file.decode(audio=0)], 1)


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
