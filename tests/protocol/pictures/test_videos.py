"""Test /v1/videos with the official client over a real JetStream and a tiny model."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import httpx
import openai
import pytest
from PIL import Image

from motet_cli.main import main
from motet_diffusion.service import Diffusion
from motet_gateway.videos import jobs as video_jobs
from motet_gateway.videos.jobs import VideoJobs
from motet_gateway.videos.store import Video
from motet_shared.errors import Unavailable
from motet_shared.messages import ModelCard
from motet_shared.testing import NatsServer, free_port, running
from support.checkpoints import diffusion_checkpoints
from support.families import video_families
from support.running.fork_server import ForkServer
from support.services.drawing_services import FakeDiffusion
from support.stages.diffusion_stage import LOADED, MODEL, config
from support.stages.served_gateway import KEY, Served, served_gateway
from support.stages.tenants_stage import OTHER, bearer, document

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
BODY: dict[str, Any] = {"model": MODEL, "prompt": "a red circle", "seconds": "0.5", "size": "32x32"}
EXTRA = {"seed": 5, "steps": 4}
FRAMES, RATE = 9, 16  # the nearest that the tiny model can make
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return video_families.write("LTXPipeline", tmp_path_factory.mktemp("ltx") / "model")


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return video_families.write("WanPipeline", tmp_path_factory.mktemp("wan") / "model")


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(store=tmp_path / "jetstream") as server:
        yield server


class FakeVideos(FakeDiffusion):
    def models(self) -> list[ModelCard]:
        return [ModelCard(name=MODEL, context=0, videos=True)]


@asynccontextmanager
async def idle_jobs(nats: NatsServer) -> AsyncIterator[tuple[VideoJobs, openai.AsyncOpenAI]]:
    """The jobs of a gateway that makes no video unless `_run` is called, and its client."""
    async with (
        served_gateway(nats, videos=0) as gateway,
        running(FakeVideos(await nats.bus("diffusion"))),
        Served(gateway).client() as client,
    ):
        await gateway.bus.directory.wait_for(lambda d: d.ready("diffusion"), 30)
        assert gateway.service is not None
        assert gateway.service.videos is not None
        yield gateway.service.videos, client


async def ended(client: openai.AsyncOpenAI, video_id: str, seconds: float = 120) -> Any:
    """Return a video that is over."""
    async with asyncio.timeout(seconds):
        while (found := await client.videos.retrieve(video_id)).status not in (  # noqa: ASYNC110
            "completed",
            "failed",
        ):
            await asyncio.sleep(0.05)
    return found


def lengths(data: bytes, codec: str = "h264") -> tuple[int, int, int]:
    with av.open(BytesIO(data), "r") as file:
        assert file.streams.video[0].codec_context.name == codec
        frames = list(file.decode(video=0))
    return len(frames), frames[0].width, frames[0].height


def image(colour: str = "green") -> bytes:
    out = BytesIO()
    Image.new("RGB", (64, 64), colour).save(out, "PNG")
    return out.getvalue()


async def test_a_video_is_made_read_remixed_and_deleted(nats: NatsServer, wan: Path) -> None:
    async with (
        served_gateway(nats) as gateway,
        running(Diffusion(config(wan), await nats.bus("diffusion"))) as painter,
        Served(gateway).client() as client,
        httpx.AsyncClient(
            base_url=f"{Served(gateway).url}/v1", headers=HEADERS, trust_env=False
        ) as http,
    ):
        await gateway.bus.directory.wait_for(lambda d: d.ready("diffusion"), 30)
        (model,) = (await client.models.list()).data
        assert (model.id, model.model_extra["kind"]) == (MODEL, "video")  # type: ignore[index]

        made = await client.videos.create(**BODY, extra_body=EXTRA)
        assert (made.object, made.status, made.progress) == ("video", "queued", 0)
        first = await ended(client, made.id)
        assert (first.status, first.progress, first.error) == ("completed", 100, None)
        assert (first.size, float(first.seconds), first.seed) == ("32x32", FRAMES / RATE, 5)
        assert first.completed_at >= first.created_at
        answer = await client.videos.download_content(first.id)
        assert answer.response.headers["content-type"] == "video/mp4"
        assert lengths(answer.content) == (FRAMES, 32, 32)
        thumbnail = await client.videos.download_content(first.id, variant="thumbnail")
        assert Image.open(BytesIO(thumbnail.content)).size == (32, 32)

        json_body = {**BODY, **EXTRA, "seconds": 0.5, "model": "sora-2"}
        second = await ended(client, (await http.post("/videos", json=json_body)).json()["id"])
        assert second.model == MODEL
        again = (await client.videos.download_content(second.id)).content
        assert again == answer.content

        remixed = await client.videos.remix(first.id, prompt="a blue square")
        remixed = await ended(client, remixed.id)
        assert (remixed.remixed_from_video_id, remixed.prompt) == (first.id, "a blue square")
        assert (remixed.seed, remixed.seconds, remixed.size) == (5, first.seconds, "32x32")
        other = (await client.videos.download_content(remixed.id)).content
        assert lengths(other) == (FRAMES, 32, 32)
        assert other != answer.content

        as_webm = {**BODY, "extra_body": {**EXTRA, "output_format": "webm"}}
        third = await ended(client, (await client.videos.create(**as_webm)).id)
        answer = await client.videos.download_content(third.id)
        assert answer.response.headers["content-type"] == "video/webm"
        assert lengths(answer.content, "vp9") == (FRAMES, 32, 32)
        await client.videos.delete(third.id)

        page = await client.videos.list(limit=2)
        assert [one.id for one in page.data] == [remixed.id, second.id]
        assert page.has_next_page()
        assert [one.id for one in (await page.get_next_page()).data] == [first.id]
        oldest = await client.videos.list(order="asc", after=first.id)
        assert [one.id for one in oldest.data] == [second.id, remixed.id]

        deleted = await client.videos.delete(first.id)
        assert (deleted.id, deleted.deleted, deleted.object) == (first.id, True, "video.deleted")
        for gone in (client.videos.retrieve, client.videos.download_content, client.videos.delete):
            with pytest.raises(openai.NotFoundError):
                await gone(first.id)
        assert isinstance(painter, Diffusion)
        painter.check_integrity()


@pytest.mark.long
async def test_a_model_that_needs_an_image_makes_videos_of_images_only(
    nats: NatsServer, tmp_path: Path
) -> None:
    """Wan 2.1: sent as a file and as a data URL; an image that says to be huge is not opened."""
    folder = video_families.write("WanImageToVideoPipeline", tmp_path / "model")
    asked = {**BODY, "size": "64x64"}
    async with (
        served_gateway(nats) as gateway,
        running(Diffusion(config(folder), await nats.bus("diffusion"))) as painter,
        Served(gateway).client() as client,
    ):
        await gateway.bus.directory.wait_for(lambda d: d.ready("diffusion"), 30)
        url = f"data:image/png;base64,{base64.b64encode(image()).decode()}"
        as_url = {**EXTRA, "input_reference": {"image_url": url}}
        files = await client.videos.create(**asked, input_reference=image(), extra_body=EXTRA)
        typed = await client.videos.create(**asked, extra_body=as_url)
        other = await client.videos.create(
            **asked, input_reference=image("red"), extra_body={**EXTRA, "output_format": "webm"}
        )
        found = [await ended(client, one.id) for one in (files, typed, other)]
        assert [one.status for one in found] == ["completed"] * 3
        data = [(await client.videos.download_content(one.id)).content for one in found]
        assert data[0] == data[1]
        assert lengths(data[0]) == lengths(data[2], "vp9") == (FRAMES, 64, 64)
        remixed = await ended(client, (await client.videos.remix(files.id, prompt="rain")).id)
        assert remixed.status == "completed"
        assert (await client.videos.download_content(remixed.id)).content != data[0]

        plain = await ended(client, (await client.videos.create(**asked, extra_body=EXTRA)).id)
        assert (plain.status, plain.error.code) == ("failed", "invalid_request")
        huge = bytearray(image())
        huge[16:24] = (60_000).to_bytes(4, "big") * 2  # width and height in the header
        huge[29:33] = zlib.crc32(huge[12:29]).to_bytes(4, "big")
        asked_huge = await client.videos.create(
            **asked, input_reference=bytes(huge), extra_body=EXTRA
        )
        failed = await ended(client, asked_huge.id)
        assert failed.status == "failed"
        assert failed.error.code in ("invalid_request", "payload_too_large")
        assert isinstance(painter, Diffusion)
        painter.check_integrity()


async def test_a_video_begins_with_an_image(nats: NatsServer, folder: Path) -> None:
    asked = {**BODY, "size": "64x64"}
    async with (
        served_gateway(nats) as gateway,
        running(Diffusion(config(folder), await nats.bus("diffusion"))),
        Served(gateway).client() as client,
        httpx.AsyncClient(
            base_url=f"{Served(gateway).url}/v1", headers=HEADERS, trust_env=False
        ) as http,
    ):
        await gateway.bus.directory.wait_for(lambda d: d.ready("diffusion"), 30)
        files = await client.videos.create(**asked, input_reference=image(), extra_body=EXTRA)
        url = f"data:image/png;base64,{base64.b64encode(image()).decode()}"
        fields = {**asked, **EXTRA, "input_reference": {"image_url": url}}
        in_json = (await http.post("/videos", json=fields)).json()
        typed = await client.videos.create(
            **asked, extra_body={**EXTRA, "input_reference": {"image_url": url}}
        )
        plain = await client.videos.create(**asked, extra_body=EXTRA)
        found = [await ended(client, one) for one in (files.id, in_json["id"], typed.id, plain.id)]
        assert [one.status for one in found] == ["completed"] * 4
        data = [(await client.videos.download_content(one.id)).content for one in found]
        assert data[0] == data[1] == data[2] != data[3]

        broken = await client.videos.create(**asked, input_reference=b"no image", extra_body=EXTRA)
        failed = await ended(client, broken.id)
        assert (failed.status, failed.error.code) == ("failed", "invalid_request")
        with pytest.raises(openai.NotFoundError):
            await client.videos.download_content(broken.id)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.videos.remix(broken.id, prompt="x")
        assert refused.value.param == "video_id"


async def test_what_cannot_be_made_is_refused_by_name(
    nats: NatsServer, wan: Path, tmp_path: Path
) -> None:
    pictures = diffusion_checkpoints.stable_diffusion(tmp_path / "model")
    settings = config(pictures)
    async with (
        served_gateway(nats) as gateway,
        running(Diffusion(config(wan), await nats.bus("diffusion"))),
        running(
            Diffusion(
                type(settings)(model=str(pictures), name="brush", metrics_port=-1),
                await nats.bus("diffusion"),
            )
        ),
        Served(gateway).client() as client,
    ):
        await gateway.bus.directory.wait_for(lambda d: len(d.ready("diffusion")) == 2, 30)
        with pytest.raises(openai.APIStatusError) as refused:
            await client.videos.create(**{**BODY, "model": "brush"})
        assert (refused.value.code, refused.value.param) == ("wrong_model_kind", "model")
        with pytest.raises(openai.APIStatusError) as refused:
            await client.images.generate(model=MODEL, prompt="x")
        assert (refused.value.code, refused.value.param) == ("wrong_model_kind", "model")
        # Without a name, the model of the endpoint's kind.
        assert (await client.videos.create(prompt="x", seconds="4", size="720x1280")).model == MODEL
        drawn = await client.images.generate(prompt="x", size="16x16", extra_body={"steps": 1})
        assert drawn.data
        for field, value in (
            ("seconds", "0"),
            ("seconds", "9999"),
            ("seconds", "soon"),
            ("size", "large"),
            ("prompt", ""),
            ("input_reference", {"file_id": "file-1"}),
        ):
            with pytest.raises(openai.BadRequestError) as error:
                await client.videos.create(**BODY, extra_body={field: value})
            assert str(error.value.param).startswith(field)


async def test_a_deleted_video_is_made_no_further(nats: NatsServer, wan: Path) -> None:
    async with (
        served_gateway(nats) as gateway,
        running(Diffusion(config(wan), await nats.bus("diffusion"))) as painter,
        Served(gateway).client() as client,
    ):
        assert isinstance(painter, Diffusion)
        await gateway.bus.directory.wait_for(lambda d: d.ready("diffusion"), 30)
        made = await client.videos.create(**BODY, extra_body={"steps": 2000})
        async with asyncio.timeout(60):
            while (await client.videos.retrieve(made.id)).progress < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (await client.videos.retrieve(made.id)).status == "in_progress"
        await client.videos.delete(made.id)
        async with asyncio.timeout(20):
            while painter.thread.engine.has_work:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert painter.thread.engine.pictures == 0
        assert (await client.videos.list()).data == []
        assert gateway.service is not None
        assert gateway.service.videos is not None
        store = gateway.service.videos.store
        for kind in ("open", "files"):
            assert await store.ids("", kind) == []
        painter.check_integrity()


async def test_what_is_stored_is_in_the_queue(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that dies between the two leaves no video that waits for ever."""
    async with idle_jobs(nats) as (jobs, client):
        create, queued = jobs.store.create, []

        async def dies(owner: str, video: Video) -> None:
            queued.append(f"{owner}:{video.id}")
            raise Unavailable("the gateway has died")

        monkeypatch.setattr(jobs.store, "create", dies)
        with pytest.raises(openai.InternalServerError):
            await client.videos.create(**BODY, extra_body=EXTRA)
        assert (await client.videos.list()).data == []
        assert await jobs.store.ids("", "open") == []
        assert not await jobs._run(queued[0], 1), "it may still be stored"
        monkeypatch.setattr(video_jobs, "_STORED_EVENTUALLY", 0.0)
        assert await jobs._run(queued[0], 2), "it is over: nothing was stored"

        async def stores_late(owner: str, video: Video) -> None:
            running_.append(asyncio.create_task(jobs._run(f"{owner}:{video.id}", 1)))
            await asyncio.sleep(0.3)
            await create(owner, video)

        running_: list[asyncio.Task[bool]] = []
        monkeypatch.setattr(jobs.store, "create", stores_late)
        made = await client.videos.create(**BODY, extra_body=EXTRA)
        assert await asyncio.wait_for(running_[0], 20)
        assert (await client.videos.retrieve(made.id)).status in ("completed", "failed")

        # A gateway that ends behind the last change of the record leaves it open for the next one.
        assert await jobs.store.ids("", "open") == []
        await jobs.store._documents.put("", f"open.{made.id}", b"")
        assert await jobs._run(f":{made.id}", 2)
        assert await jobs.store.ids("", "open") == []


async def test_a_video_waits_for_a_model_that_is_away(nats: NatsServer) -> None:
    async with idle_jobs(nats) as (jobs, client):
        made = await client.videos.create(**BODY, extra_body=EXTRA)
        video = await jobs.store.get("", made.id)
        video.model = "elsewhere"
        revision = await jobs.store.revision("", made.id)
        assert revision is not None
        assert await jobs.store.replace("", video, revision)
        assert not await jobs._run(f":{made.id}", 9), "however often"
        assert (await client.videos.retrieve(made.id)).status != "failed"
        jobs._deadline = 0.0
        assert await jobs._run(f":{made.id}", 9)
        failed = await client.videos.retrieve(made.id)
        assert failed.error is not None
        assert (failed.status, failed.error.code) == ("failed", "model_not_found")


async def test_a_video_is_made_on_while_the_store_does_not_answer(
    nats: NatsServer, wan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that was stored without an answer is this gateway's own; the end is stored late."""
    async with (
        served_gateway(nats, videos=0) as gateway,
        running(Diffusion(config(wan), await nats.bus("diffusion"))) as painter,
        Served(gateway).client() as client,
    ):
        await gateway.bus.directory.wait_for(lambda d: d.ready("diffusion"), 30)
        assert gateway.service is not None
        assert gateway.service.videos is not None
        jobs = gateway.service.videos
        made = await client.videos.create(**BODY, extra_body=EXTRA)
        replace, write = jobs.store.replace, jobs.store.write
        failures: list[str] = []

        async def replace_unheard(owner: str, video: Video, revision: int) -> int | None:
            failures.append(video.status)
            if failures.count(video.status) == 2:  # stored, but the answer is lost
                assert await replace(owner, video, revision)
            if failures.count(video.status) <= 2:
                raise Unavailable("no answer")
            return await replace(owner, video, revision)

        async def write_late(owner: str, name: str, data: bytes) -> Any:
            failures.append(name.rpartition(".")[2])
            if failures.count("mp4") < 3 and name.endswith("mp4"):
                raise Unavailable("no answer")
            return await write(owner, name, data)

        monkeypatch.setattr(video_jobs, "_SAVE_INTERVAL", 0.01)
        monkeypatch.setattr(jobs.store, "replace", replace_unheard)
        monkeypatch.setattr(jobs.store, "write", write_late)
        assert await jobs._run(f":{made.id}", 1)
        assert {"queued", "completed"} <= set(failures)
        assert failures.count("mp4") == 3
        assert (await client.videos.retrieve(made.id)).status == "completed"
        answer = await client.videos.download_content(made.id)
        assert lengths(answer.content) == (FRAMES, 32, 32)
        assert isinstance(painter, Diffusion)
        assert painter.thread.engine.pictures == 1
        assert await jobs.store.ids("", "open") == []


async def test_videos_are_their_tenants_and_bounded(nats: NatsServer, tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(document("images_per_hour = 9"))
    settings = {"tenants_file": file, "videos": 0, "open_videos": 2}
    async with (
        served_gateway(nats, **settings) as gateway,
        running(FakeVideos(await nats.bus("diffusion"))),
        httpx.AsyncClient(
            trust_env=False, base_url=f"http://127.0.0.1:{gateway.port}/v1", timeout=30
        ) as http,
    ):
        await gateway.bus.directory.wait_for(lambda d: d.ready("diffusion"), 30)
        long = await http.post("/videos", json=BODY | {"seconds": 10}, headers=bearer())
        assert (long.status_code, long.json()["error"]["code"]) == (400, "invalid_request")
        asked = await asyncio.gather(
            *(http.post("/videos", json=BODY | {"seconds": 2}, headers=bearer()) for _ in range(4))
        )
        assert sorted(one.status_code for one in asked) == [200, 200, 429, 429]
        mine = [one.json()["id"] for one in asked if one.status_code == 200]
        full = await http.post("/videos", json=BODY, headers=bearer())
        assert (full.status_code, full.json()["error"]["code"]) == (429, "insufficient_quota")
        for path in (f"/videos/{mine[0]}", f"/videos/{mine[0]}/content"):
            assert (await http.get(path, headers=bearer(OTHER))).status_code == 404
        assert (await http.get("/videos", headers=bearer(OTHER))).json()["data"] == []
        assert (await http.delete(f"/videos/{mine[0]}", headers=bearer(OTHER))).status_code == 404
        assert (await http.post("/videos", json=BODY, headers=bearer(OTHER))).status_code == 200
        assert (await http.delete(f"/videos/{mine[0]}", headers=bearer())).status_code == 200
        assert (await http.post("/videos", json=BODY, headers=bearer())).status_code == 200
        assert (await http.delete(f"/videos/{mine[1]}", headers=bearer())).status_code == 200
        spent = await http.post("/videos", json=BODY | {"seconds": 5}, headers=bearer())
        assert (spent.status_code, spent.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_without_a_store_it_says_so() -> None:
    async with (
        NatsServer() as nats,
        served_gateway(nats) as gateway,
        Served(gateway).client() as client,
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            await client.videos.create(**BODY)
        assert refused.value.status_code == 503


async def test_the_command_line_writes_a_video(
    nats: NatsServer, wan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    film = tmp_path / "film.mp4"
    async with (
        served_gateway(nats) as gateway,
        running(Diffusion(config(wan), await nats.bus("diffusion"))),
        Served(gateway).client() as client,
    ):
        await gateway.bus.directory.wait_for(lambda d: d.ready("diffusion"), 30)
        (tmp_path / "key").write_text(KEY)
        server = ["--url", Served(gateway).url, "--api-key-file", str(tmp_path / "key")]
        options = ["--seconds", "0.5", "--size", "32x32", "--steps", "3", "-o", str(film)]
        code = await asyncio.to_thread(main, ["film", *server, *options, "a", "red", "circle"])
        assert code == 0
        assert capsys.readouterr().out == f"{film}\n"
        assert lengths(film.read_bytes()) == (FRAMES, 32, 32)
        assert (await client.videos.list()).data == []
        webm = tmp_path / "film.webm"
        options[-1] = str(webm)
        assert await asyncio.to_thread(main, ["film", *server, *options, "a", "red", "circle"]) == 0
        assert lengths(webm.read_bytes(), "vp9") == (FRAMES, 32, 32)
        assert await asyncio.to_thread(main, ["film", *server, "-o", "film.png", "x"]) != 0


@pytest.mark.extended("families", after=1)
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", ["WanPipeline", "WanImageToVideoPipeline 2.2"])
async def test_a_video_survives_the_death_of_its_worker_and_of_its_gateway(
    nats: NatsServer, tmp_path: Path, family: str
) -> None:
    """Killed in the middle, each: the video goes on, and is the one that nothing has struck."""
    port = free_port()
    folder = video_families.write(family, tmp_path / "model")
    worker = ("--model", str(folder), "--name", MODEL, "--threads", "1", "--max-steps", "2000")
    serve = ("--port", str(port), "--job-patience", "2")
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with (
        ForkServer(*LOADED, "motet_gateway.service") as forks,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20, http_client=http
        ) as client,
    ):
        gateway = await forks.start(nats, "motet_gateway", *serve)
        workers = [await forks.start(nats, "motet_diffusion", *worker)]
        asked: dict[str, Any] = {"seed": 5, "steps": 120}
        if "draw" not in video_families.kinds_of(family):
            url = f"data:image/png;base64,{base64.b64encode(image()).decode()}"
            asked["input_reference"] = {"image_url": url}
        whole = await _created(client, asked)
        assert (await ended(client, whole)).status == "completed"
        wanted = (await client.videos.download_content(whole)).content

        struck = await _created(client, asked)
        await _begun(client, struck)
        os.kill(workers.pop(), signal.SIGKILL)
        await forks.start(nats, "motet_diffusion", *worker)
        assert (await ended(client, struck, 180)).status == "completed"
        assert (await client.videos.download_content(struck)).content == wanted

        struck = await _created(client, asked)
        await _begun(client, struck)
        os.kill(gateway, signal.SIGKILL)
        await forks.start(nats, "motet_gateway", *serve)
        assert (await ended(client, struck, 180)).status == "completed"
        assert (await client.videos.download_content(struck)).content == wanted


async def _created(client: openai.AsyncOpenAI, extra: dict[str, Any]) -> str:
    """Return the id of a new video, once the model is known to the gateway."""
    async with asyncio.timeout(180):
        while True:
            try:
                return (await client.videos.create(**BODY, extra_body=extra)).id
            except openai.APIError:
                await asyncio.sleep(0.2)


async def _begun(client: openai.AsyncOpenAI, video_id: str) -> None:
    async with asyncio.timeout(60):
        while (found := await client.videos.retrieve(video_id)).progress < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert found.status == "in_progress"
