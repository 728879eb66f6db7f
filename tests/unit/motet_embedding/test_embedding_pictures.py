"""Vectors of texts and pictures against transformers' own towers, and through the service."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pil
from torch.nn import functional
from transformers import AutoImageProcessor, AutoModel

import motet_embedding.picture_reader
from motet_embedding.config import EmbeddingConfig, EngineConfig
from motet_embedding.picture_reader import PictureReader
from motet_embedding.pictures import PictureEncoder
from motet_embedding.rankers import load_ranker
from motet_embedding.service import Embedding, load_embedder
from motet_embedding.texts import Picture, Text, Texts
from motet_media.pictures import to_file
from motet_pipelines.chat.vision import InputMedia, lent_pictures
from motet_pipelines.embed import Embedded, embed
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest, ConfigError, Overloaded, UnsupportedParameter
from motet_shared.messages import BlobRef, Embed, Image, Vectors
from motet_shared.testing import MemoryHub, memory_bus, running, settle
from motet_shared.wire.bus import Bus
from support.checkpoints.embedding_checkpoints import clip, plain
from support.running.refusals import refuses
from support.running.until import until

TEXTS = ["ba be di", "go", "a b c d e f g h"]
COLOURS = ("red", "blue", "white")


def pictures() -> list[Pil.Image]:
    made = [Pil.new("RGB", (40 + 8 * index, 36), colour) for index, colour in enumerate(COLOURS)]
    made[0].paste((0, 255, 0), (3, 3, 20, 20))
    return made


def reference(path: Path, length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors of TEXTS and of the pictures, of one at a time."""
    model: Any = AutoModel.from_pretrained(path).eval()
    processor = AutoImageProcessor.from_pretrained(path, backend="pil")
    texts = ids_of(path)
    with torch.no_grad():
        rows = []
        for ids in texts:
            ids = [*ids, *[1] * ((length or len(ids)) - len(ids))]
            rows.append(model.get_text_features(input_ids=torch.tensor([ids])).pooler_output[0])
        seen = [
            model.get_image_features(**processor(one, return_tensors="pt")).pooler_output[0]
            for one in pictures()
        ]
    return functional.normalize(torch.stack(rows)), functional.normalize(torch.stack(seen))


def ids_of(path: Path) -> list[list[int]]:
    model = load(path)
    return [one.ids for one in Texts(model.folder, model.limit, model.vocabulary).read(TEXTS)]


def load(path: Path) -> PictureEncoder:
    found = load_embedder(EngineConfig(model=str(path)))
    assert isinstance(found, PictureEncoder)
    return found


@pytest.mark.long(after=1)
@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_texts_and_pictures_as_transformers_computes_them(family: str, tmp_path: Path) -> None:
    path = clip(tmp_path, family)
    texts, seen = reference(path, 24 if family == "siglip" else None)
    encoder = load(path)
    given = Texts(encoder.folder, encoder.limit, encoder.vocabulary).read(TEXTS)
    prepared = [encoder.prepare(one) for one in pictures()]
    mixed: list[Text | Picture] = [
        given[0],
        prepared[0],
        given[1],
        prepared[1],
        prepared[2],
        given[2],
    ]
    found = encoder.encode(mixed)
    due = torch.stack([texts[0], seen[0], texts[1], seen[1], seen[2], texts[2]])
    torch.testing.assert_close(found, due, atol=1e-5, rtol=0)
    assert (seen[1:] - seen[:-1]).norm(dim=1).min() > 1e-3


async def test_pictures_arrive_as_files(tmp_path: Path) -> None:
    path = clip(tmp_path / "clip")
    texts, seen = reference(path, None)
    hub = MemoryHub()
    config = EmbeddingConfig(model=str(path), name="clip", threads=1)
    bus = await memory_bus(hub, "gateway")
    store = await BlobStore(bus.instance, 1 << 20).start()
    async with running(Embedding(config, await memory_bus(hub, "embedding"))):
        await settle()
        files = [
            InputMedia(to_file(one), param=f"input[{index}]")
            for index, one in enumerate(pictures())
        ]

        async def ask(given: list[InputMedia]) -> tuple[np.ndarray[Any, Any], int]:
            outcome = Embedded()
            async with lent_pictures(store, given) as lent:
                request = Embed(model="clip", input=[*TEXTS], pictures=lent)
                async with aclosing(embed(bus, request, outcome, deadline=60.0)) as parts:
                    data = [part.data async for part in parts if isinstance(part, Vectors)]
            rows = np.frombuffer(b"".join(data), "<f4").reshape(-1, 16)
            return rows, outcome.tokens

        rows, tokens = await ask(files)
        np.testing.assert_allclose(rows, torch.cat([texts, seen]), atol=1e-5)
        assert tokens == sum(map(len, ids_of(path))) + 3 * 17
        with refuses(BadRequest, "input[1]"):
            await ask([files[0], InputMedia(b"no picture", param="input[1]")])
        assert len((await ask(files[:1]))[0]) == 4, "it serves on"
    await store.close()
    await bus.close()


async def test_a_model_of_texts_takes_no_pictures_and_no_ranker_is_made_of_one(
    tmp_path: Path,
) -> None:
    with refuses(ConfigError, "model"):
        load_ranker(EngineConfig(model=str(clip(tmp_path / "clip"))))
    hub = MemoryHub()
    config = EmbeddingConfig(model=str(plain(tmp_path / "bert")), name="bert", threads=1)
    bus = await memory_bus(hub, "gateway")
    store = await BlobStore(bus.instance, 1 << 20).start()
    async with running(Embedding(config, await memory_bus(hub, "embedding"))):
        await settle()
        picture = InputMedia(to_file(pictures()[0]), param="input[0].image_url")
        async with lent_pictures(store, [picture]) as lent:
            request = Embed(model="bert", input=[], pictures=lent)
            with refuses(UnsupportedParameter, "input[0].image_url"):
                async with asyncio.timeout(30), aclosing(embed(bus, request)) as parts:
                    await anext(parts)
    await store.close()
    await bus.close()


class HeldReader:
    """Read pictures whose decoding waits for `go_on`; `order` has the fields that have begun."""

    def __init__(self, path: Path, bus: Bus, monkeypatch: pytest.MonkeyPatch, **settings: Any):
        self._model = load(path)
        self.reader = PictureReader(EmbeddingConfig(model=str(path), **settings), bus)
        self.order: list[str] = []
        self.go_on = asyncio.Event()
        monkeypatch.setattr(self.reader._store, "get", self._get)
        monkeypatch.setattr(motet_embedding.picture_reader, "decoding", self._decode)

    async def read(self, name: str, count: int, queued: int = 0) -> list[Picture]:
        file = BlobRef("shm", address="", key="", nbytes=1)
        images = [Image(file=file, param=name) for _ in range(count)]
        return await self.reader.read(images, self._model, queued)

    async def _get(self, _ref: BlobRef, **_options: Any) -> bytes:
        return b""

    async def _decode(
        self, _work: Any, _model: Any, _data: bytes, _most: int, param: str, **_options: Any
    ) -> Picture:
        self.order.append(param)
        await self.go_on.wait()
        return Picture(None, 1)


async def test_a_list_of_pictures_does_not_hold_up_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await memory_bus(MemoryHub(), "embedding")
    held = HeldReader(clip(tmp_path / "clip"), bus, monkeypatch)
    long = asyncio.create_task(held.read("long", 20))
    await until(lambda: held.order == ["long"] * 2)  # the lone request has both slots
    short = asyncio.create_task(held.read("short", 1))
    await settle()
    held.go_on.set()
    assert (len(await short), len(await long)) == (1, 20)
    assert "short" in held.order[:5]
    await bus.close()


async def test_pictures_that_would_not_fit_into_the_queue_are_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await memory_bus(MemoryHub(), "embedding")
    held = HeldReader(clip(tmp_path / "clip"), bus, monkeypatch, max_waiting=512)
    first = asyncio.create_task(held.read("first", 300))
    await until(lambda: held.order)
    for count, queued in ((213, 0), (13, 200)):
        with pytest.raises(Overloaded, match="max_waiting"):
            async with asyncio.timeout(20):
                await held.read("second", count, queued)
    second = asyncio.create_task(held.read("second", 12, 200))
    held.go_on.set()
    assert (len(await first), len(await second)) == (300, 12)
    assert len(await held.read("third", 312, 200)) == 312
    await bus.close()
