"""A pipeline of one's own: draw an idea, look at the picture, and describe it aloud.

    eval "$(motet credentials environment)"
    python examples/pipeline.py "two red circles and a blue square" --folder described

A pipeline is an async generator over other pipelines and streams of services. It has no state
between requests; leaving it early cancels what it has opened, since every inner generator is closed
by `aclosing`; and where a service dies, the inner pipelines go on at another instance.
"""

from __future__ import annotations

import argparse
import asyncio
import wave
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from motet_pipelines.chat.models import servable
from motet_pipelines.chat.vision import InputMedia, lent_pictures
from motet_pipelines.connection import connected
from motet_pipelines.images.draw import Drawn, draw
from motet_pipelines.voice.speak import RATE
from motet_pipelines.voice.voice import reply
from motet_shared.blobs.store import BlobStore
from motet_shared.messages import Audio, Chat, DenoisingProgress, Draw, Sampling, Speak, Text
from motet_shared.wire.bus import Bus
from motet_shared.wire.instances import served

QUESTION = [{"type": "image"}, {"type": "text", "text": "What do you see?"}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Names of the models of one description."""

    draws: str
    looks: str
    speaks: str


@dataclass(frozen=True, slots=True)
class Picture:
    """The finished picture, a PNG file."""

    data: bytes


Part = DenoisingProgress | Picture | Text | Audio


async def describe(
    bus: Bus, store: BlobStore, models: Models, idea: str, *, seed: int = 0
) -> AsyncGenerator[Part, None]:
    """Yield the steps of a drawing, the picture, then words and speech about it as they are made.

    The same seed gives the same picture. Errors of the services are raised as they are.
    """
    drawn = Drawn()
    request = Draw(model=models.draws, prompt=idea, seed=seed)
    async with aclosing(draw(bus, store, request, drawn)) as steps:
        async for step in steps:
            yield step
    yield Picture(drawn.data)
    async with lent_pictures(store, [InputMedia(drawn.data)]) as images:
        look = Chat(
            model=models.looks,
            messages=[{"role": "user", "content": QUESTION}],
            images=images,
            sampling=Sampling(temperature=0),
        )
        async with aclosing(reply(bus, look, Speak(model=models.speaks, text=""))) as batches:
            async for batch in batches:
                for part in batch:
                    yield part


async def models_of(bus: Bus) -> Models:
    """Return the first model of each kind, as soon as the stack has them."""
    await bus.directory.wait_for(
        lambda found: servable(found) and served(found, "diffusion") and served(found, "tts"), 10
    )
    draws, speaks = (next(iter(served(bus.directory, role))) for role in ("diffusion", "tts"))
    return Models(draws=draws, looks=next(iter(servable(bus.directory))), speaks=speaks)


async def run(idea: str, folder: Path, seed: int) -> None:
    """Write picture.png and description.wav, and print the words."""
    pcm = b""
    async with connected() as bus, BlobStore(bus.instance, 64 << 20) as store:
        models = await models_of(bus)
        async with aclosing(describe(bus, store, models, idea, seed=seed)) as parts:
            async for part in parts:
                if isinstance(part, Picture):
                    (folder / "picture.png").write_bytes(part.data)
                elif isinstance(part, Text):
                    print(part.text, end="", flush=True)
                elif isinstance(part, Audio):
                    pcm += part.data
    print()
    with wave.open(str(folder / "description.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(pcm)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw an idea and describe the picture aloud.")
    parser.add_argument("--folder", type=Path, default=Path("described"), help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("idea", metavar="TEXT")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(run(args.idea, args.folder, args.seed))


if __name__ == "__main__":
    main()
