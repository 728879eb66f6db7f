"""Frames of a camera in `/v1/realtime`: `session.video`, both ways to send them, and what is kept of them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from motet_shared.blobs.store import BlobStore
from motet_shared.messages import ModelCard
from support.clients.gateway_client import Socket, World, session, world
from support.services.fake_services import MODEL

FRAMES = 400


def picture(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number).digest() * 8


def base64_of(number: int) -> str:
    return base64.b64encode(picture(number)).decode()


class Eyes:
    """A session, and the files that each request to the model had: those of a merged picture together."""

    def __init__(self, here: World, socket: Socket, seen: list[list[list[bytes]]]):
        self.here, self.socket, self.seen = here, socket, seen

    def show(self, number: int) -> None:
        self.socket.send("input_image_buffer.append", image=base64_of(number))

    async def ask(self) -> list[list[int]]:
        """Ask something out of band; return the numbers of the frames of its prompt."""
        self.socket.send("response.create", response={"conversation": "none"})
        done = (await self.socket.until("response.done", "error"))[-1]
        assert done["response"]["status"] == "completed"
        numbers = {picture(number): number for number in range(FRAMES)}
        return [[numbers[file] for file in files] for files in self.seen[-1]]


@pytest.fixture
async def eyes() -> AsyncIterator[Eyes]:
    seen: list[list[list[bytes]]] = []
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(world(patience=0.5))
        here.tokenizer.card = ModelCard(name=MODEL, context=4096, images=True)
        here.tokenizer.bus.heartbeat()
        store = await stack.enter_async_context(BlobStore(here.tokenizer.bus.instance, 1 << 20))

        async def fetch(request: Any) -> None:
            seen.append(
                [
                    [
                        bytes(await store.get(file, release=False))
                        for file in (*one.merged, one.file)
                    ]
                    for one in request.images
                ]
            )

        here.tokenizer.on_request = fetch
        async with session(here.app) as socket:
            yield Eyes(here, socket, seen)
        await here.service.close()


async def configured(socket: Socket, video: Any) -> Any:
    socket.send("session.update", session={"type": "realtime", "video": video})
    event = (await socket.until("session.updated", "error"))[-1]
    return event.get("error") or event["session"].get("video")


@pytest.mark.parametrize(
    ("video", "pictures"),
    [
        ({"type": "window", "frames": 3}, [[17], [18], [19]]),
        ({"type": "stride", "frames": 4}, [[0], [8], [16], [19]]),
        (
            {"type": "merged", "frames": 2, "groups": 2, "group_size": 4},
            [[12, 13, 14, 15], [16, 17], [18], [19]],
        ),
    ],
    ids=["window", "stride", "merged"],
)
async def test_a_prompt_has_the_frames_of_the_policy(
    eyes: Eyes, video: dict[str, Any], pictures: list[list[int]]
) -> None:
    assert await configured(eyes.socket, video) == video
    for number in range(20):
        eyes.show(number)
    eyes.socket.say("What is it?")
    await eyes.socket.until("conversation.item.done")
    assert await eyes.ask() == pictures
    last = eyes.here.tokenizer.requests[-1].messages[-1]
    assert last["content"] == [{"type": "image"}, {"type": "text", "text": "What is it?"}]


async def test_items_of_images_alone_are_frames(eyes: Eyes) -> None:
    """They are reported as added, and are not items of the conversation: no number of them fills it."""
    await configured(eyes.socket, {"type": "window"})
    for number in range(20):
        url = f"data:image/png;base64,{base64_of(number)}"
        item = {
            "id": f"frame_{number}",
            "type": "message",
            "role": "user",
            "content": [{"type": "input_image", "image_url": url}],
        }
        eyes.socket.send("conversation.item.create", item=item)
        done = (await eyes.socket.until("conversation.item.done"))[-1]
        assert done["item"]["content"] == [{"type": "input_image", "detail": "auto"}]
    eyes.socket.send("conversation.item.retrieve", item_id="frame_19")
    assert (await eyes.socket.until("error"))[-1]["error"]["code"] == (
        "item_retrieve_invalid_item_id"
    )
    assert await eyes.ask() == [[number] for number in range(12, 20)]


async def test_hundreds_of_frames_leave_nothing_behind(eyes: Eyes) -> None:
    """Prompts, lent files and what the session keeps are bounded, however many frames come."""
    await configured(eyes.socket, {"type": "merged", "frames": 2, "groups": 2, "group_size": 3})
    sizes = set()
    for number in range(FRAMES):
        eyes.show(number)
        if number > 20 and number % 20 == 0:
            pictures = await eyes.ask()
            sizes.add((len(pictures), len(eyes.here.tokenizer.requests[-1].messages)))
            assert sum(map(len, pictures)) <= 2 + 2 * 3
    assert sizes == {(4, 2)}
    uploads = await eyes.here.service.uploads()
    assert uploads.stats()["blobs"] == 0
    uploads.check_integrity()


async def test_given_contexts_have_no_frames(eyes: Eyes) -> None:
    await configured(eyes.socket, {"type": "window"})
    eyes.show(1)
    content = [{"type": "input_text", "text": "alone"}]
    item = {"type": "message", "role": "user", "content": content}
    eyes.socket.send("response.create", response={"conversation": "none", "input": [item]})
    await eyes.socket.until("response.done")
    assert eyes.seen[-1] == []


@pytest.mark.parametrize(
    ("video", "param"),
    [
        ({"type": "window", "frames": 0}, "session.video.frames"),
        ({"type": "window", "frames": 33}, "session.video.frames"),
        ({"type": "window", "groups": 2}, "session.video.groups"),
        ({"type": "stride", "frames": 1}, "session.video.frames"),
        ({"type": "merged", "group_size": 1}, "session.video.group_size"),
        ({"type": "merged", "groups": 17}, "session.video.groups"),
        ({"type": "everything"}, "session.video.type"),
        ("window", "session.video"),
    ],
)
async def test_wrong_values_are_named(eyes: Eyes, video: Any, param: str) -> None:
    assert (await configured(eyes.socket, video))["param"] == param
    eyes.socket.say("still here")
    await eyes.socket.until("conversation.item.done")


@pytest.mark.parametrize(
    ("event", "param"),
    [
        ({"image": base64_of(0)}, "session.video"),
        ({"image": "no base64!"}, "image"),
        ({"image": ""}, "image"),
        ({"image": "data:text/plain;base64,AAAA"}, "image"),
        ({"image": base64_of(0), "detail": "most"}, "detail"),
    ],
)
async def test_frames_that_are_refused_are_named(
    eyes: Eyes, event: dict[str, Any], param: str
) -> None:
    eyes.socket.send("input_image_buffer.append", event_id="mine", **event)
    error = (await eyes.socket.until("error"))[-1]["error"]
    assert (error["param"], error["event_id"]) == (param, "mine")


async def test_a_model_without_eyes_refuses_video(eyes: Eyes) -> None:
    eyes.here.tokenizer.card = ModelCard(name=MODEL, context=4096)
    eyes.here.tokenizer.bus.heartbeat()
    async with session(eyes.here.app) as socket:
        found = await configured(socket, {"type": "window"})
    assert (found["param"], found["code"]) == ("session.video", "unsupported_parameter")
