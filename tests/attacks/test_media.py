"""Attack the decoding of sound, pictures and video: files that name other files, that cost hours, that crash."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from motet_encoder.video import open_video
from motet_media.pictures import open_picture
from motet_media.pool import Pool, decoding
from motet_media.sound_file import claimed_seconds, read_audio
from motet_media.worker import JobLimits
from motet_shared.errors import BadRequest, Cancelled
from support.checkpoints.asr_checkpoints import RATE, noise, tiny_whisper, wav
from support.running.cpu_time import CpuTime
from support.running.refusals import refuses
from support.stages.asr_stage import Service, serving

ROOT = Path(__file__).parents[2]
USUAL = JobLimits(cpu=5.0, wall=30.0, memory=256 << 20)
SOON = 25  # seconds, on a busy machine; an attack that succeeds holds a thread for 30 and more


def refused(reason: str) -> BadRequest:
    return BadRequest(reason, param="file")


@pytest.fixture(scope="module")
def hostile() -> Iterator[Pool]:
    """A pool of two whose decoders are hostile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests"), str(ROOT / "shared")]))
        patch.setenv("MOTET_SECRET", "sesame")
        pool = Pool("support.media.hostile_decoders", 2)
        list(pool.run("echo", b"", USUAL, refused))
        yield pool
        pool.close()


def echo(pool: Pool, data: bytes = b"x") -> int:
    """Check that the pool works; returns the child's process."""
    ((meta, back),) = pool.run("echo", data, USUAL, refused)
    assert back == data
    return int(meta["pid"])


# --------------------------------------------------------------------------------------------- files that name others
def naming(folder: Path, port: int) -> dict[str, bytes]:
    """Media files that make FFmpeg open a sound in `folder`, or a socket."""
    secret = folder / "secret.wav"
    secret.write_bytes(wav(noise(2.0)))
    sdp = "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
    return {
        "concat": f"ffconcat version 1.0\nfile '{secret}'\n".encode(),
        "concat-relative": b"ffconcat version 1.0\nfile secret.wav\n",
        "sdp": f"{sdp}m=audio {port} RTP/AVP 0\na=rtpmap:0 PCMU/8000\n".encode(),
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nfile://{secret}\n#EXT-X-ENDLIST\n".encode(),
        "hls-http": f"#EXTM3U\n#EXTINF:2,\nhttp://127.0.0.1:{port}/a.ts\n#EXT-X-ENDLIST\n".encode(),
        "dash": (
            '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period><AdaptationSet>'
            f'<Representation id="0"><BaseURL>http://127.0.0.1:{port}/a.mp4</BaseURL></Representation>'
            "</AdaptationSet></Period></MPD>"
        ).encode(),
    }


@pytest.fixture
def knocked() -> Iterator[tuple[int, list[Any]]]:
    """A port, and the connections that were made to it."""
    calls: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    calls.append(server.accept())
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], calls
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("kind", ["concat", "concat-relative", "sdp", "hls", "hls-http", "dash"])
def test_a_file_that_names_others_opens_none(
    kind: str, tmp_path: Path, knocked: tuple[int, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    port, calls = knocked
    data = naming(tmp_path, port)[kind]
    began = time.monotonic()
    assert claimed_seconds(data) == 0.0
    with pytest.raises(BadRequest) as sound:
        read_audio(data, 60.0)
    with pytest.raises(BadRequest) as video:
        open_video(data, count=4, max_pixels=1 << 20, max_length=100, param="video")
    assert (sound.value.param, video.value.param) == ("file", "video")
    assert time.monotonic() - began < SOON
    assert not calls


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    async with serving(tiny_whisper(tmp_path_factory.mktemp("whisper"))) as service:
        assert (await service.post(file=wav(noise(1.0)))).status_code == 200  # children are started
        yield service


@pytest.mark.asyncio(loop_scope="module")
async def test_a_transcription_reads_no_file_of_the_server(
    service: Service, tmp_path: Path
) -> None:
    for kind, data in naming(tmp_path, 9).items():
        reply = await service.post(file=data)
        assert reply.status_code == 400, (kind, reply.text)
        error = reply.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "file")


@pytest.mark.asyncio(loop_scope="module")
async def test_eight_session_descriptions_do_not_delay_others(
    service: Service, tmp_path: Path
) -> None:
    sdp = naming(tmp_path, 9)["sdp"]
    attacks = [asyncio.create_task(service.post(file=sdp, timeout=60)) for _ in range(8)]
    began = time.monotonic()
    usual = await service.post(file=wav(noise(1.0)))
    assert usual.status_code == 200
    assert time.monotonic() - began < SOON
    assert {reply.status_code for reply in await asyncio.gather(*attacks)} == {400}


# ------------------------------------------------------------------------------------------------------- confinement
def test_children_have_no_torch_no_files_and_no_network(
    hostile: Pool, tmp_path: Path, knocked: tuple[int, list[Any]]
) -> None:
    marked = tmp_path / "marked"
    marked.write_text("secret")
    port, calls = knocked
    found: dict[str, Any] = {}
    for meta, _ in hostile.run("look", b"", USUAL, refused, path=str(marked), port=port):
        found |= meta
    assert found.pop("forked") == int(
        not hostile.confinement()["processes"]
    )  # the kernel exempts root
    assert set(found.values()) == {0}, found
    assert not calls
    assert not (tmp_path / "marked.new").exists()


def test_freed_descriptors_are_of_no_use(
    hostile: Pool, tmp_path: Path, knocked: tuple[int, list[Any]]
) -> None:
    """What is promised beyond descriptors depends on the system, and is reported."""
    marked = tmp_path / "marked"
    marked.write_text("secret")
    granted = hostile.confinement()
    assert granted["descriptors"]
    found: dict[str, Any] = {}
    for meta, _ in hostile.run(
        "free_descriptors", b"", USUAL, refused, path=str(marked), port=knocked[0]
    ):
        found |= meta
    assert found["read"] == int(not granted["files"])
    assert found["connected"] == int(not granted["network"])


# ------------------------------------------------------------------------------------------------------------ limits
def test_a_decoder_that_spins_is_killed_and_others_go_on(hostile: Pool) -> None:
    errors: list[BadRequest] = []

    def attack() -> None:
        try:
            list(hostile.run("spin", b"", JobLimits(1.0, 60.0, 1 << 28), refused))
        except BadRequest as error:
            errors.append(error)

    thread = threading.Thread(target=attack)
    thread.start()
    echo(hostile)
    assert thread.is_alive()
    thread.join(50)
    assert [(error.param, "processor time" in error.message) for error in errors] == [
        ("file", True)
    ]
    echo(hostile)


def test_a_decoder_that_waits_is_killed(hostile: Pool) -> None:
    with refuses(BadRequest, "file"):
        list(hostile.run("sleep", b"", JobLimits(5.0, 0.5, 1 << 28), refused))
    echo(hostile)


def test_a_memory_bomb_meets_the_address_space(hostile: Pool) -> None:
    with pytest.raises(BadRequest, match="64 MB"):
        list(hostile.run("hoard", b"", JobLimits(5.0, 30.0, 64 << 20), refused, nbytes=1 << 30))
    echo(hostile)


def test_a_crash_is_a_refusal(hostile: Pool) -> None:
    with pytest.raises(BadRequest, match="SIGSEGV"):
        list(hostile.run("crash", b"", USUAL, refused))
    echo(hostile)


def test_payloads_larger_than_the_window_come_whole(hostile: Pool) -> None:
    echo(hostile, os.urandom((20 << 20) + 7))


def test_a_child_is_no_further_ahead_than_a_part(hostile: Pool) -> None:
    """Endless parts stay in the child's bounded memory, and end with their consumer."""
    parts = hostile.run("endless", b"", USUAL, refused)
    assert [next(parts)[0]["number"] for _ in range(50)] == list(range(1, 51))
    parts.close()
    echo(hostile)


async def test_who_leaves_kills_the_decoding(hostile: Pool) -> None:
    pids: list[int] = []
    outcome: list[BaseException] = []
    begun, loop = asyncio.Event(), asyncio.get_running_loop()

    def wait() -> None:
        try:
            for meta, _ in hostile.run("sleep", b"", JobLimits(5.0, 60.0, 1 << 28), refused):
                pids.append(int(meta["pid"]))
                loop.call_soon_threadsafe(begun.set)
        except BaseException as error:
            outcome.append(error)

    task = asyncio.create_task(decoding(wait))
    await asyncio.wait_for(begun.wait(), 30)
    await asyncio.sleep(0.1)
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while alive(pids[0]) or not outcome:
        assert time.monotonic() - began < SOON
        await asyncio.sleep(0.01)
    assert isinstance(outcome[0], Cancelled)
    await asyncio.to_thread(echo, hostile)


def test_children_die_with_a_service_that_is_killed() -> None:
    """Even amid a computation, of which nothing else would wake them."""
    code = """
import threading, time
from motet_shared.errors import BadRequest
from motet_media.pool import Pool
from motet_media.worker import JobLimits
pool = Pool("support.media.hostile_decoders", 2)
((meta, _),) = pool.run("echo", b"", JobLimits(5.0, 30.0, 1 << 28), BadRequest)
threading.Thread(target=lambda: list(pool.run("spin", b"", JobLimits(50.0, 60.0, 1 << 28), BadRequest))).start()
time.sleep(0.3)
print(meta["pid"], flush=True)
time.sleep(60)
"""
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "shared")])
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert alive(pid)
        process.send_signal(signal.SIGKILL)
    began = time.monotonic()
    while alive(pid):
        assert time.monotonic() - began < SOON
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended while the file was read
        return False


# ------------------------------------------------------------------------------------------------------ costly files
def progressive(side: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan, of a few bytes, is repeated."""
    out = BytesIO()
    Image.new("RGB", (side, side), (90, 120, 30)).save(out, "JPEG", progressive=True)
    data = out.getvalue()
    place = data.rindex(b"\xff\xda")
    return data[:place] + data[place:-2] * scans + b"\xff\xd9"


def test_a_jpeg_of_thousands_of_scans_is_refused_at_once() -> None:
    open_picture(progressive(16, 1), max_pixels=1 << 24)
    data = progressive(3000, 5000)
    assert len(data) < 200_000
    with CpuTime() as spent, refuses(BadRequest, "image[0]"):
        open_picture(data, max_pixels=1 << 24, param="image[0]")
    assert spent.seconds < 3  # reading all scans takes 13 and more


def test_a_usual_progressive_jpeg_is_read() -> None:
    assert open_picture(progressive(3000, 1), max_pixels=1 << 24).size == (3000, 3000)


def test_a_jpeg_within_a_tiff_is_read() -> None:
    """Decode it: its scans are not counted, so the limits of the child alone bound its cost."""
    out = BytesIO()
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(out, "TIFF", compression="jpeg")
    assert open_picture(out.getvalue(), max_pixels=1 << 20).size == (64, 64)


def test_pictures_and_sounds_still_work_after_all_this() -> None:
    assert len(read_audio(wav(noise(1.0)), 60.0)) == RATE
