"""Show frames of the pocket world to a realtime session of pocket-chat, and ask about them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any

import websockets
from PIL import Image

from benchmarks.stack.stack import Stack, nats_stack
from benchmarks.support.paths import MODELS

sys.path.append(str(MODELS))

from recipes.see.data import is_held_out_scene  # behind the path, as what comes next
from recipes.see.questions import VISUAL_QUESTION_MAKERS, in_reading_order
from recipes.world.pictures import draw
from recipes.world.scenes import Question, Scene, sample_scene

MODEL = "pocket-chat"
CATEGORIES = ("count", "colour", "shape", "existence", "description", "where")
REMEMBERED = ("colour", "where")  # questions about a thing that is out of sight
REPLY_SECONDS = 30.0
_TOKENS = 24
_CACHE = "8MiB"  # of pictures, and of keys and values: full in a minute or two


@contextlib.asynccontextmanager
async def eyes_stack(threads: int, *gateway: str) -> AsyncIterator[Stack]:
    """Yield a ready stack of pocket-chat: encoder, decode, tokenizer and gateway."""
    folder = str(MODELS / MODEL)
    shared = ["--model", folder, "--threads", str(threads)]
    async with nats_stack(OMP_NUM_THREADS=str(threads)) as (stack, _):
        await stack.serve(
            {
                "motet_encoder": ("encoder", [*shared, "--cache-memory", _CACHE]),
                "motet_llm": ("decode", [*shared, "--kv-memory", _CACHE]),
                "motet_tokenizer": ("tokenizer", ["--model", folder]),
                "motet_gateway": ("gateway", ["--port", str(stack.port), *gateway]),
            }
        )
        await stack.until_ready("/v1/models", '"images"')
        yield stack


def held_out_scene(rng: Random) -> Scene:
    """Return a scene that pocket-chat was not trained on."""
    while not is_held_out_scene(scene := sample_scene(rng, min_things=2)):
        pass
    return in_reading_order(scene)


def scene_without(shapes: set[str], rng: Random) -> Scene:
    """Return a held-out scene that lacks these shapes."""
    while True:
        scene = held_out_scene(rng)
        if not shapes & {str(thing.kind.shape) for thing in scene.things}:
            return scene


def question_about(scene: Scene, categories: tuple[str, ...], rng: Random) -> Question | None:
    """Return a question with one right answer, None if the scene allows none."""
    makers = [VISUAL_QUESTION_MAKERS[name] for name in rng.sample(categories, len(categories))]
    return next((found for maker in makers if (found := maker(scene, rng)) is not None), None)


def asked_scene(
    categories: tuple[str, ...], rng: Random, *, shapes: int = 0
) -> tuple[Scene, Question]:
    """Return a held-out scene, of this number of shapes if given, and a question about it."""
    while True:
        scene = held_out_scene(rng)
        if shapes and len({thing.kind.shape for thing in scene.things}) != shapes:
            continue
        if (question := question_about(scene, categories, rng)) is not None:
            return scene, question


def frame_of(scene: Scene, rng: Random) -> str:
    """Return a picture of a scene as base64."""
    file = io.BytesIO()
    Image.fromarray(draw(scene, rng)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@dataclass
class Answer:
    text: str
    input_tokens: int


class Camera:
    """Hold a realtime session: frames in, answers out."""

    def __init__(self, socket: websockets.ClientConnection):
        self._socket = socket

    async def send(self, kind: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": kind, **fields}))

    async def until(self, kind: str) -> dict[str, Any]:
        """Return the next event of a type. Raises RuntimeError for an error."""
        async with asyncio.timeout(REPLY_SECONDS):
            while True:
                event: dict[str, Any] = json.loads(await self._socket.recv())
                if event["type"] == kind:
                    return event
                if event["type"] == "error":
                    raise RuntimeError(f"the session refused: {event['error']}")

    async def show(self, frame: str) -> None:
        await self.send("input_image_buffer.append", image=frame)

    async def ask(self, question: str) -> Answer:
        """Ask about the frames, without leaving a trace in the conversation."""
        content = [{"type": "input_text", "text": question}]
        item = {"id": "question", "type": "message", "role": "user", "content": content}
        await self.send("conversation.item.create", item=item)
        await self.send("response.create", response={"conversation": "none"})
        done = (await self.until("response.done"))["response"]
        await self.send("conversation.item.delete", item_id="question")
        if done["status"] not in ("completed", "incomplete"):
            raise RuntimeError(f"a reply failed: {done['status_details']}")
        text = "".join(part["text"] for item in done["output"] for part in item["content"])
        return Answer(text.strip(), done["usage"]["input_tokens"])


@contextlib.asynccontextmanager
async def camera(port: int, video: dict[str, Any]) -> AsyncIterator[Camera]:
    """Open a session with a policy of frames."""
    url = f"ws://127.0.0.1:{port}/v1/realtime?model={MODEL}"
    async with websockets.connect(url, proxy=None, max_size=None, compression=None) as socket:
        opened = Camera(socket)
        session = {
            "type": "realtime",
            "output_modalities": ["text"],
            "temperature": 0,
            "max_output_tokens": _TOKENS,
            "video": video,
        }
        await opened.send("session.update", session=session)
        await opened.until("session.updated")
        yield opened
