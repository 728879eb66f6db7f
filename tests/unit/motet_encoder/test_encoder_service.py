"""The encoder actor: files in, embeddings by reference out; what it remembers, shares, refuses and gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from motet_encoder.cache import EmbeddingCache
from motet_encoder.service import Encoder
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import (
    BadRequest,
    BlobError,
    ConfigError,
    PayloadTooLarge,
    UnknownModel,
    UnsupportedParameter,
)
from motet_shared.messages import EncodedImage
from support.checkpoints.vlm_checkpoints import picture, tiny_vlm
from support.media.videos import random_video
from support.running.refusals import refuses
from support.stages.vlm_stage import Stage, png, stage

TOKENS, HIDDEN = 9, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm("llava_clip", tmp_path_factory.mktemp("llava"))


@pytest.fixture
async def world(folder: Path) -> AsyncIterator[tuple[Stage, Encoder]]:
    async with stage(folder) as made:
        yield made, await made.encoder(max_picture=10_000, max_file=1 << 20)


async def embeddings(world: Stage, seen: EncodedImage) -> torch.Tensor:
    ref = seen.embedding.embeddings
    data = await world.store.get(ref, release=False)
    return torch.from_numpy(np.frombuffer(data, np.float32).reshape(ref.shape).copy())


async def test_what_is_seen_is_what_the_model_sees(world: tuple[Stage, Encoder]) -> None:
    made, encoder = world
    seen = await made.see(made.pictures(1)[0])
    family = encoder.encoder.thread.engine.family
    expected = family.encode([family.prepare(picture(1), 0)])[0]
    assert seen.ids == [family.placeholder] * TOKENS
    assert seen.embedding.embeddings.shape == (1, TOKENS, HIDDEN)
    assert torch.allclose(await embeddings(made, seen), expected, atol=1e-5)


async def test_seen_again_it_is_neither_fetched_nor_encoded(world: tuple[Stage, Encoder]) -> None:
    made, encoder = world
    image = made.pictures(1)[0]
    first = await made.see(image)
    made.store.drop(image.file)
    assert await made.see(image) == first
    assert encoder.stats()["pictures"] == 1
    assert encoder.stats()["cache_hits"] == 1
    made.store.release(image.file)


async def test_another_resolution_is_another_sight(world: tuple[Stage, Encoder]) -> None:
    made, _ = world
    image = made.pictures(1)[0]
    first, second = (
        await made.see(image),
        await made.see(msgspec.structs.replace(image, max_pixels=900)),
    )
    assert first.embedding.name != second.embedding.name


async def test_a_video_is_a_sight_of_its_own(world: tuple[Stage, Encoder]) -> None:
    made, encoder = world
    image = msgspec.structs.replace(made.file(random_video(10), param="video"), is_video=True)
    seen = await made.see(image)
    family = encoder.encoder.thread.engine.family
    assert seen.ids == [family.placeholder] * 2 * TOKENS  # a second long: two frames
    assert seen.embedding.embeddings.shape == (1, 2 * TOKENS, HIDDEN)
    assert await made.see(image) == seen
    assert encoder.stats()["cache_hits"] == 1
    with refuses(BadRequest, "video") as caught:
        await made.see(msgspec.structs.replace(made.file(b"no film", param="video"), is_video=True))
    assert caught.value.param == "video"


async def test_many_callers_at_a_time_share_the_work(world: tuple[Stage, Encoder]) -> None:
    made, encoder = world
    same, other = made.pictures(1, 2)
    seen = await asyncio.gather(*[made.see(image) for image in (same, other, same, same)])
    assert seen[0] == seen[2] == seen[3] != seen[1]
    assert encoder.stats()["pictures"] == 2


async def test_one_of_two_callers_leaves(world: tuple[Stage, Encoder]) -> None:
    made, encoder = world
    image = made.pictures(3)[0]
    leaves, stays = (asyncio.create_task(made.see(image)) for _ in range(2))
    await asyncio.sleep(0)
    leaves.cancel()
    assert (await stays).ids
    with pytest.raises(asyncio.CancelledError):
        await leaves
    gone = asyncio.create_task(made.see(made.pictures(4)[0]))
    await asyncio.sleep(0.001)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await made.idle()
    assert len(encoder._work) == 0


async def test_what_is_no_picture_is_refused(world: tuple[Stage, Encoder]) -> None:
    made, encoder = world
    file = png(picture(1))
    for data, error in (
        (b"not a picture", BadRequest),
        (file[: len(file) // 2], BadRequest),
        (png(picture(1, 200, 100)), PayloadTooLarge),
        (b"\x89PNG" + bytes(1 << 20), PayloadTooLarge),
    ):
        with refuses(error, "messages[0].content[1].image_url"):
            await made.see(made.file(data, param="messages[0].content[1].image_url"))
    assert encoder.stats()["pictures"] == 0


async def test_other_refusals(world: tuple[Stage, Encoder]) -> None:
    made, _ = world
    image = made.pictures(1)[0]
    with refuses(UnknownModel, "model"):
        await made.see(image, model="blind")
    with refuses(BadRequest, "max_pixels"):
        await made.see(msgspec.structs.replace(image, max_pixels=-1))
    made.store.drop(image.file)
    with pytest.raises(BlobError):
        await made.see(image)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"device": "gpu"}, "device"),
        (
            {"device": f"cuda:{torch.cuda.device_count()}"},
            "device",
        ),
        ({"dtype": "float16"}, "dtype"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
async def test_devices_and_types_that_are_not_there_are_refused(
    folder: Path, settings: dict[str, str], param: str
) -> None:
    async with stage(folder) as made:
        with refuses(ConfigError, param):
            await made.encoder(**settings)


async def test_it_says_what_it_computes_with(world: tuple[Stage, Encoder]) -> None:
    _, encoder = world
    stats = encoder.stats()
    assert (stats["device"], stats["dtype"], stats["weights"]) == ("cpu", "float32", "exact")
    assert stats["kernels"]


async def test_the_least_recently_used_makes_room() -> None:
    async with BlobStore("encoder-1", 4096) as store:
        cache = EmbeddingCache(store)
        for number in range(3):
            await cache.put(f"picture {number}", torch.full((1, 10, 32), float(number)), [1], ())
            assert cache.get("picture 0") is not None
        first, lost = cache.get("picture 0"), cache.get("picture 1")
        assert first is not None
        newest = await cache.put("picture 3", torch.zeros(1, 10, 32), [1], ())
        await cache.put("picture 4", torch.zeros(1, 10, 32), [1], ())
        assert cache.get("picture 3") == newest
        assert cache.evictions >= 1
        assert lost is None or cache.evictions > 1
        with refuses(PayloadTooLarge, "max_pixels"):
            await cache.put("huge", torch.zeros(1, 100, 32), [1], ())
        assert store.stats()["blobs"] == cache.stats()["cached"]


async def test_merged_pictures_are_the_mean_of_theirs(world: tuple[Stage, Encoder]) -> None:
    made, encoder = world
    first, second, third = made.pictures(1, 2, 3)
    ones = torch.stack([await embeddings(made, await made.see(one)) for one in (first, second)])
    merged = msgspec.structs.replace(second, merged=[first.file])
    seen = await made.see(merged)
    assert torch.allclose(await embeddings(made, seen), ones.mean(0), atol=1e-6)
    assert seen.ids == (await made.see(first)).ids
    assert encoder.stats()["pictures"] == 2, "neither is encoded again"
    assert await made.see(merged) == seen
    other = await made.see(msgspec.structs.replace(third, merged=[first.file]))
    assert other.embedding.name != seen.embedding.name
    assert encoder.stats()["pictures"] == 3


async def test_what_two_calls_merge_at_the_same_time_is_kept_once(
    world: tuple[Stage, Encoder],
) -> None:
    made, encoder = world
    first, second = made.pictures(1, 2)
    for one in (first, second):
        await made.see(one)
    merged = msgspec.structs.replace(second, merged=[first.file])
    seen = await asyncio.gather(*(made.see(merged) for _ in range(4)))
    assert all(one == seen[0] for one in seen)
    stats = encoder.stats()
    assert stats["blobs"] == stats["cached"] == 3


async def test_only_pictures_are_merged(world: tuple[Stage, Encoder]) -> None:
    made, _ = world
    (first,) = made.pictures(1)
    for fields in ({"is_audio": True}, {"is_video": True}):
        with refuses(UnsupportedParameter, "image.merged"):
            await made.see(msgspec.structs.replace(first, merged=[first.file], **fields))
