"""Images in chat requests: what reaches the tokenizer, what is refused and why, and what is fetched from where."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from PIL import Image as Pil

from motet_gateway.http.remote import fetch, is_public
from motet_gateway.openai.chat_images import LOW_DETAIL
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest, PayloadTooLarge
from motet_shared.messages import Chat, ModelCard, Text
from motet_shared.testing import settle
from support.clients.gateway_client import World, world
from support.peers.stream_server import listening
from support.running.refusals import refuses

WHERE = "messages[0].content[0].image_url"
VIDEO = "messages[0].content[0].video_url"


@pytest.fixture
async def here() -> AsyncIterator[World]:
    async with world(
        patience=0.2, upload_memory=1 << 20, max_upload=1 << 20, max_image=4096
    ) as made:
        yield made
        await made.service.close()


def png(colour: str) -> bytes:
    file = io.BytesIO()
    Pil.new("RGB", (4, 4), colour).save(file, "PNG")
    return file.getvalue()


def data_uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image(url: str, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **options}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


async def asked(here: World, *messages: dict[str, Any]) -> tuple[Chat, list[bytes]]:
    """What the tokenizer was asked, and the files that it could read meanwhile."""
    files: list[bytes] = []
    answered = here.tokenizer._answer

    async def reading(call: Any, request: Chat) -> None:
        async with BlobStore("tokenizer-reader") as store:
            files.extend(
                [bytes(await store.get(one.file, release=False)) for one in request.images]
            )
        await answered(call, request)

    here.tokenizer._answer = reading  # type: ignore[assignment]
    here.tokenizer.reply = lambda request: [Text("Seen.", [1])]
    http = await here.ask(messages=list(messages)).done()
    assert http.status == 200, http.body
    request = here.tokenizer.requests[-1]
    assert isinstance(request, Chat)
    return request, files


async def test_images_go_along_in_order(here: World) -> None:
    red, blue = png("red"), png("blue")
    request, files = await asked(
        here,
        user(text("First"), image(data_uri(red)), image(data_uri(blue), detail="low")),
        {"role": "assistant", "content": "I see."},
        user(
            image(data_uri(red), detail="high"),
            text("again"),
            image(data_uri(blue), max_pixels=900, detail="low"),
        ),
    )
    assert request.messages == [
        {"role": "user", "content": [text("First"), {"type": "image"}, {"type": "image"}]},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": [{"type": "image"}, text("again"), {"type": "image"}]},
    ]
    assert files == [red, blue, red, blue]
    assert [one.max_pixels for one in request.images] == [0, LOW_DETAIL, 0, 900]
    assert [one.param for one in request.images] == [
        "messages[0].content[1].image_url",
        "messages[0].content[2].image_url",
        "messages[2].content[0].image_url",
        "messages[2].content[2].image_url",
    ]
    assert len({one.file.key for one in request.images}) == 2, "equal files lie in the store once"
    store = await here.service.uploads()
    assert store.stats()["blobs"] == 0, "and are dropped when the reply has ended"


def video(url: str, **options: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url, **options}}


async def test_a_video_goes_along_among_the_images(here: World) -> None:
    video_uri = "data:video/mp4;base64," + base64.b64encode(b"frames").decode()
    request, files = await asked(
        here,
        user(image(data_uri(png("red"))), video(video_uri, max_pixels=900), text("What is it?")),
    )
    assert request.messages[0]["content"] == [
        {"type": "image"},
        {"type": "image"},
        text("What is it?"),
    ]
    assert files == [png("red"), b"frames"]
    assert [one.is_video for one in request.images] == [False, True]
    assert request.images[1].param == "messages[0].content[1].video_url"
    assert request.images[1].max_pixels == 900


def drawn(colour: str, **fields: Any) -> dict[str, Any]:
    """A picture as it came with an earlier reply."""
    return {**image(data_uri(png(colour))), "index": 0, **fields}


async def test_what_was_drawn_earlier_is_part_of_the_conversation(here: World) -> None:
    spoken = {
        "role": "assistant",
        "content": "A circle.",
        "images": [drawn("red", revised_prompt="a red circle")],
    }
    request, files = await asked(
        here, user(text("Draw.")), spoken, user(image(data_uri(png("blue"))), text("Same?"))
    )
    roles = [message["role"] for message in request.messages]
    assert roles == ["user", "assistant", "tool", "user", "assistant", "user"]
    (call,) = request.messages[1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"prompt": "a red circle"}
    assert request.messages[2]["tool_call_id"] == call["id"]
    assert json.loads(request.messages[2]["content"])["prompt"] == "a red circle"
    assert request.messages[3]["content"][0] == {"type": "image"}
    assert request.messages[4] == {"role": "assistant", "content": "A circle."}
    assert files == [png("red"), png("blue")]
    assert request.images[0].param == "messages[1].images[0].image_url"


async def test_a_blind_model_is_told_what_it_drew_and_not_shown_it(here: World) -> None:
    here.tokenizer.models = lambda: [ModelCard(name="pocket-fake", context=9, tools=True)]  # type: ignore[method-assign]
    here.tokenizer.bus.heartbeat()
    await settle()
    spoken = {"role": "assistant", "images": [drawn("red")]}
    request, files = await asked(here, user(text("Draw.")), spoken, user(text("?")))
    assert [message["role"] for message in request.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert files == []


async def test_messages_without_images_stay_strings(here: World) -> None:
    request, _ = await asked(here, user(text("a"), text("b")), user(image(data_uri(png("red")))))
    assert request.messages[0]["content"] == "a\nb"


async def test_how_many_pixels_auto_means_is_a_setting() -> None:
    async with world(image_pixels=12345) as here:
        request, _ = await asked(
            here, user(image(data_uri(png("red"))), image(data_uri(png("red")), detail="high"))
        )
        assert [one.max_pixels for one in request.images] == [12345, 0]
        await here.service.close()


@pytest.mark.parametrize(
    ("part", "status", "param", "message"),
    [
        (
            image("data:text/plain;base64,QQ=="),
            400,
            f"{WHERE}.url",
            "'data:text/plain;base64'",
        ),
        (image("data:image/png,QQ=="), 400, f"{WHERE}.url", "send data:image/png;base64"),
        (image("data:image/png;base64,Q"), 400, f"{WHERE}.url", "base64"),
        (image("data:image/png;base64,§"), 400, f"{WHERE}.url", "base64"),
        (image("data:image/png;base64,"), 400, f"{WHERE}.url", "send data:image/png;base64"),
        (image("ftp://example.org/x.png"), 400, f"{WHERE}.url", "'ftp://example.org/x.png'"),
        (image("cat.png"), 400, f"{WHERE}.url", "'cat.png'"),
        (image("https://example.org/x.png"), 400, f"{WHERE}.url", "--remote-images"),
        (image(data_uri(bytes(5000))), 413, f"{WHERE}.url", "4096"),
        (video(data_uri(b"x")), 400, f"{VIDEO}.url", "send data:video/mp4;base64"),
        (video("film.mp4"), 400, f"{VIDEO}.url", "'film.mp4'"),
        (image("data:", detail="huge"), 400, f"{WHERE}.detail", "huge"),
        (image("data:", max_pixels=0), 400, f"{WHERE}.max_pixels", "0"),
        ({"type": "image_url", "image_url": "data:"}, 400, WHERE, "data:"),
        ({"type": "image_url", "image_url": {}}, 400, f"{WHERE}.url", "is required"),
    ],
)
async def test_a_refusal_names_the_image(
    here: World, part: Any, status: int, param: str, message: str
) -> None:
    http = await here.ask(messages=[user(part)]).done()
    error = http.json()["error"]
    assert (http.status, error["param"]) == (status, param)
    assert message in error["message"]
    assert not here.tokenizer.requests


async def test_a_model_that_reads_no_images(here: World) -> None:
    here.tokenizer.models = lambda: [ModelCard(name="pocket-fake", context=9)]  # type: ignore[method-assign]
    here.tokenizer.bus.heartbeat()
    await settle()
    http = await here.ask(messages=[user(image(data_uri(png("red"))))]).done()
    error = http.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", WHERE)


async def test_images_elsewhere_than_in_the_users_messages(here: World) -> None:
    http = await here.ask(messages=[{"role": "system", "content": [image("data:")]}]).done()
    error = http.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "messages[0].content[0]")


# ----------------------------------------------------------------------------------------------------------- by URL


@asynccontextmanager
async def web(*answers: bytes, pause: float = 0.0) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that gives one answer after the other; its address, and what it was asked."""
    left, heard = list(answers), []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        await asyncio.sleep(pause)
        writer.write(left.pop(0))
        await writer.drain()

    async with listening(answer) as port:
        yield f"http://127.0.0.1:{port}", heard


def found(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (
        len(body),
        body,
    )


def moved(target: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()


async def get(url: str, most: int = 1000, seconds: float = 10.0, here: str = "127.0.0.1") -> bytes:
    """As the gateway would, if `here` were on the open Internet."""
    return await fetch(
        url, "p", most=most, seconds=seconds, allowed=lambda address: address == here
    )


async def test_a_url_is_fetched_and_redirects_are_followed() -> None:
    async with web(moved("/there?x=1"), found(b"picture")) as (url, heard):
        assert await get(f"{url}/here") == b"picture"
        assert heard[0].startswith(b"GET /here HTTP/1.1\r\nHost: 127.0.0.1:")
        assert heard[1].startswith(b"GET /there?x=1 ")


@pytest.mark.parametrize(
    "target",
    ["http://127.0.0.2:1/", "http://[::1]/", "file:///etc/passwd", "http://localhost2.invalid/"],
)
async def test_redirects_lead_nowhere_private(target: str) -> None:
    async with web(moved(target)) as (url, _):
        with pytest.raises(BadRequest) as caught:
            await get(url)
    assert caught.value.param == "p"


async def test_bounds_of_what_is_fetched() -> None:
    async with web(found(bytes(2000))) as (url, _):
        with pytest.raises(PayloadTooLarge, match="1000"):
            await get(url)
    async with web(*[moved("/again")] * 5) as (url, _):
        with refuses(BadRequest, "p"):
            await get(url)
    async with web(found(b"late"), pause=5.0) as (url, _):
        with pytest.raises(BadRequest, match=r"0\.1 s"):
            await get(url, seconds=0.1)
    for answer, named in (
        (b"nonsense\r\n\r\n", "127.0.0.1"),
        (found(b"")[:9] + b"404 No\r\n\r\n", "404"),
    ):
        async with web(answer) as (url, _):
            with pytest.raises(BadRequest, match=named):
                await get(url)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/x", "http://localhost:1/x", "http://[::1]:1/", "http://0.0.0.0:1/"]
)
async def test_addresses_of_this_machine_are_not_reached(url: str) -> None:
    with pytest.raises(BadRequest) as caught:
        await fetch(url, "p", most=1000, seconds=10)
    assert caught.value.param == "p"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("127.0.0.53", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("ff02::1", False),
        ("no address", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public
