"""One request never harms the rest: aborts in every phase, storms of disconnects, broken uploads.

A client that stays is told what it is told alone (a drawing within 1 of 255), and nothing is left of those that left:
no call, no descriptor.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import socket
import struct
import time
import zlib
from collections.abc import Iterator

import psutil
import pytest

from chaos.moves.features import BRUSH, EARS, EYES, FEATURES, PHASES, TEXT, tiered
from chaos.moves.world import World
from support.media.spoken import say, wav

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("moves"),
    pytest.mark.asyncio(loop_scope="package"),
]
# One feature of each service, for those who stay while others misbehave.
STAYING = ("seeds and logprobs", "speech", "a recording", "live speech", "a drawing")
_LEAVERS, _STORM = 4, 8.0  # clients of each feature that leave again and again, for so many seconds
_LEFT_OPEN = 4  # descriptors: connections that a process keeps for reuse
_BOUNDARY = "frontier"


EVERY = [(name, phase) for name in FEATURES for phase in PHASES]
COVERING = [(name, PHASES[number % len(PHASES)]) for number, name in enumerate(FEATURES)]


async def _stays(world: World, name: str) -> None:
    due = await world.undisturbed(name)
    told = await FEATURES[name].ask(world.url, lambda progress: None)
    assert FEATURES[name].alike(told, due.result)


def _descriptors(world: World) -> dict[str, int]:
    return {one.name: psutil.Process(one.pid).num_fds() for one in world.processes.members}


def _check_descriptors(world: World, before: dict[str, int]) -> None:
    now = _descriptors(world)
    grown = {
        name: (count, now[name]) for name, count in before.items() if now[name] > count + _LEFT_OPEN
    }
    assert not grown, f"descriptors before and after: {grown}"


@pytest.mark.parametrize(("name", "phase"), tiered(EVERY, COVERING))
async def test_who_leaves_changes_nothing_for_who_stays(
    world: World, name: str, phase: str
) -> None:
    await world.undisturbed(name)
    await asyncio.gather(world.left(name, phase), _stays(world, name))


@pytest.mark.long
async def test_a_storm_of_disconnects(world: World) -> None:
    for name in STAYING:
        await world.undisturbed(name)
    await world.rest()
    before, over = _descriptors(world), time.monotonic() + _STORM
    chance = random.Random(8)

    async def come_and_go(name: str) -> None:
        while time.monotonic() < over:
            asking = asyncio.create_task(FEATURES[name].ask(world.url, lambda progress: None))
            await asyncio.sleep(chance.uniform(0, 0.6))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async with asyncio.TaskGroup() as tasks:
        for name in STAYING:
            for _ in range(_LEAVERS):
                tasks.create_task(come_and_go(name))
            tasks.create_task(_stays(world, name))
    await world.rest()
    _check_descriptors(world, before)


# ------------------------------------------------------------------------------------------------------ broken uploads
def _post(path: str, body: bytes, kind: str, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    fields = f"Host: x\r\nConnection: close\r\nContent-Type: {kind}\r\nContent-Length: {size}"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body


def _form(file: bytes, name: str, file_name: str, **fields: str) -> bytes:
    parts = [
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'
        for key, value in fields.items()
    ]
    head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="{file_name}"\r\n\r\n'
    return "".join(parts).encode() + head.encode() + file + f"\r\n--{_BOUNDARY}--\r\n".encode()


def _png(width: int, height: int, data: bytes) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        checked = kind + body
        return struct.pack(">I", len(body)) + checked + struct.pack(">I", zlib.crc32(checked))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def _uploads() -> Iterator[tuple[str, bytes]]:
    """Yield requests that cannot be answered, by what is wrong with them."""
    multipart, plain = f"multipart/form-data; boundary={_BOUNDARY}", "application/json"
    noise = random.Random(9).randbytes(20_000)
    recording = wav(say("Two red circles."))
    pictures = {
        "noise": noise,
        "a picture that ends early": _png(64, 64, zlib.compress(bytes(100))),
        "a picture of 10^10 pixels": _png(100_000, 100_000, zlib.compress(bytes(1000))),
        "a picture without data": _png(64, 64, b""),
    }
    sounds = {
        "noise": noise,
        "a header alone": recording[:44],
        "a header cut short": recording[:20],
        "sizes that lie": recording[:4]
        + b"\xff\xff\xff\xff"
        + recording[8:40]
        + b"\xff\xff\xff\x7f",
    }
    for what, sound in sounds.items():
        body = _form(sound, "file", "a.wav", model=EARS, language="en")
        yield f"sound: {what}", _post("/v1/audio/transcriptions", body, multipart)
    for what, shown in pictures.items():
        form = _form(shown, "image", "a.png", model=BRUSH, prompt="a", size="32x32")
        yield f"picture to change: {what}", _post("/v1/images/edits", form, multipart)
        url = "data:image/png;base64," + base64.b64encode(shown).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}]
        chat = {"model": EYES, "messages": [{"role": "user", "content": content}]}
        yield (
            f"picture to see: {what}",
            _post("/v1/chat/completions", json.dumps(chat).encode(), plain),
        )
    whole = _form(recording, "file", "a.wav", model=EARS)
    yield "a form without its end", _post("/v1/audio/transcriptions", whole[:-20], multipart)
    yield "another boundary", _post("/v1/audio/transcriptions", whole, multipart + "x")
    chat = {"model": TEXT, "messages": [{"role": "user", "content": "hi"}]}
    data = json.dumps(chat).encode()
    yield "half of a document", _post("/v1/chat/completions", data[: len(data) // 2], plain)
    yield "a deep document", _post("/v1/chat/completions", b"[" * 100_000, plain)
    yield "bytes that are no text", _post("/v1/chat/completions", b'{"model": "\xff\xfe"}', plain)
    yield (
        "sizes that are no numbers",
        (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
        ),
    )


def _cut_off() -> Iterator[bytes]:
    """Yield beginnings of uploads whose clients are gone."""
    kind = f"multipart/form-data; boundary={_BOUNDARY}"
    form = _form(wav(say("Two red circles.")), "file", "a.wav", model=EARS)
    for share in (0.0, 0.1, 0.5, 0.99):
        yield _post("/v1/audio/transcriptions", form[: int(len(form) * share)], kind, len(form))
        yield _post("/v1/images/edits", form[: int(len(form) * share)], kind, 1 << 20)
    yield b"POST /v1/audio/transc"
    yield b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"


def _sent(url: str, request: bytes) -> int:
    """Send a request; return the status of its answer, 0 if the connection is closed instead."""
    host, port = url.removeprefix("http://").split(":")
    answer = io.BytesIO()
    with socket.create_connection((host, int(port)), timeout=30) as client:
        try:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            while part := client.recv(1 << 16):
                answer.write(part)
        except ConnectionError:
            pass
    line = answer.getvalue().partition(b"\r\n")[0].split()
    return int(line[1]) if len(line) > 1 else 0


def _reset(url: str, request: bytes) -> None:
    """Send the beginning of a request, and reset the connection."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=30)
    client.sendall(request)
    time.sleep(0.05)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.long
async def test_broken_uploads_are_refused_and_harm_nobody(world: World) -> None:
    names = ("a recording", "a drawing", "a picture in the prompt")
    for name in names:
        await world.undisturbed(name)
    await world.rest()
    before = _descriptors(world)
    wrong: dict[str, int] = {}

    async def send() -> None:
        for what, request in _uploads():
            status = await asyncio.to_thread(_sent, world.url, request)
            if not 400 <= status < 500:
                wrong[what] = status
        for request in _cut_off():
            await asyncio.to_thread(_reset, world.url, request)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        for name in names:
            tasks.create_task(_stays(world, name))
    assert not wrong, f"statuses of broken uploads: {wrong}"
    await world.rest()
    _check_descriptors(world, before)
