"""From words to pictures: the official client, the gateway on a real port, a real nats-server and the real service."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from motet_cli.main import main
from motet_diffusion.service import Diffusion
from motet_media.pictures import to_file
from support.checkpoints import diffusion_checkpoints
from support.checkpoints.condition_checkpoints import write_controlnet, write_ip_adapter
from support.checkpoints.diffusion_checkpoints import SIZE
from support.stages.diffusion_stage import MODEL, config, pixels
from support.stages.served_gateway import KEY, Served, served

PROMPT = "two red circles"
OURS: dict[str, Any] = {"seed": 5, "steps": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return diffusion_checkpoints.stable_diffusion(tmp_path_factory.mktemp("sd") / "model", "euler")


@dataclass
class Service(Served):
    painters: list[Diffusion]


@asynccontextmanager
async def serving(folder: Path, count: int = 1, **settings: Any) -> AsyncIterator[Service]:
    async with served(
        "diffusion", lambda bus: Diffusion(config(folder, **settings), bus), count
    ) as (
        gateway,
        painters,
    ):
        yield Service(gateway, painters)


@pytest.fixture
async def service(folder: Path) -> AsyncIterator[Service]:
    async with serving(folder) as made:
        yield made


def decoded(found: Any) -> bytes:
    return base64.b64decode(found.b64_json)


async def pictures(
    client: openai.AsyncOpenAI, ours: dict[str, Any] | None = None, **fields: Any
) -> list[bytes]:
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "extra_body": {**OURS, **(ours or {})},
        **fields,
    }
    return [decoded(image) for image in (await client.images.generate(**body)).data or []]


async def refusal(client: openai.AsyncOpenAI, **fields: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await pictures(client, **fields)
    return caught.value


async def test_pictures(service: Service) -> None:
    async with service.client() as client:
        (one,) = await pictures(client)
        assert pixels(one).shape == (SIZE, SIZE, 3)
        assert [one] == await pictures(
            client, model="gpt-image-1"
        )  # whatever it is called, it is the one that is here
        three = await pictures(client, n=3)
        assert len(set(three)) == 3
        assert abs(pixels(three[0]) - pixels(one)).max() <= 1
        (wide,) = await pictures(client, size="64x32", output_format="webp")
        assert (Image.open(BytesIO(wide)).format, Image.open(BytesIO(wide)).size) == (
            "WEBP",
            (64, 32),
        )
        (other,) = await pictures(client, {"guidance_scale": 1.0, "negative_prompt": "blue"})
        assert other != one
        models = {model.id: model for model in (await client.models.list()).data}
        extra = {"kind": "image", "status": "ready", "capabilities": ["image"]}
        assert models[MODEL].model_extra == extra
    service.painters[0].check_integrity()


async def test_a_picture_forms_before_ones_eyes(service: Service) -> None:
    async with service.client() as client:
        events = await client.images.generate(
            model=MODEL, prompt=PROMPT, stream=True, partial_images=2, size="32x32", extra_body=OURS
        )
        told: list[Any] = [event async for event in events]
        (whole,) = await pictures(client, size="32x32")
    assert [event.type for event in told] == [
        "image_generation.partial_image",
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    assert [event.partial_image_index for event in told[:2]] == [0, 1]
    assert all(pixels(decoded(event)).shape == (32, 32, 3) for event in told)
    assert decoded(told[-1]) == whole
    assert told[-1].size == "32x32"


async def test_pictures_are_changed(service: Service) -> None:
    image = to_file(Image.new("RGB", (SIZE, SIZE), "red"))
    clear = Image.new("RGBA", (SIZE, SIZE), (0, 0, 0, 255))
    clear.paste((0, 0, 0, 0), (0, 0, SIZE // 2, SIZE))  # its left half is to be drawn anew
    ours = {**OURS, "strength": 0.7}

    async def changed(client: openai.AsyncOpenAI, **fields: Any) -> bytes:
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": PROMPT,
            "image": ("a.png", image),
            "extra_body": ours,
        }
        return decoded((await client.images.edit(**{**body, **fields})).data[0])

    async with service.client() as client:
        one = await changed(client)
        assert one != (await pictures(client))[0]
        filled = await changed(client, mask=("m.png", to_file(clear)))
        assert filled != one
        assert one == await changed(client, image=[("a.png", image)])
        told: list[Any] = [
            event
            async for event in await client.images.edit(
                model=MODEL,
                prompt=PROMPT,
                image=("a.png", image),
                stream=True,
                partial_images=1,
                extra_body=ours,
            )
        ]
        assert [event.type for event in told] == [
            "image_edit.partial_image",
            "image_edit.completed",
        ]
        assert decoded(told[-1]) == one
        with pytest.raises(openai.BadRequestError, match="`image`"):
            await changed(client, image=[("a.png", image), ("b.png", image)])
        with pytest.raises(openai.BadRequestError):
            await changed(client, image=("a.png", image[:50]))


async def test_adapters_are_asked_for_by_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In JSON, in a form (as JSON text), and on the command line."""
    ink = diffusion_checkpoints.write_adapter(folder, tmp_path / "ink.safetensors", 1)
    image, output = to_file(Image.new("RGB", (SIZE, SIZE), "red")), tmp_path / "a.png"

    def loras(*scales: float, name: str = "ink") -> dict[str, Any]:
        return {"loras": [{"name": name, "scale": scale} for scale in scales]}

    async with serving(folder, loras=(f"ink={ink}",)) as service, service.client() as client:

        async def changed(**ours: Any) -> bytes:
            form = {
                **OURS,
                "strength": 0.7,
                **{name: json.dumps(value) for name, value in ours.items()},
            }
            body: Any = {
                "model": MODEL,
                "prompt": PROMPT,
                "image": ("a.png", image),
                "extra_body": form,
            }
            return decoded((await client.images.edit(**body)).data[0])

        plain, strong, weak = [
            (await pictures(client, ours))[0] for ours in ({}, loras(1.0), loras(0.3))
        ]
        assert len({plain, strong, weak}) == 3
        assert [weak] == await pictures(client, loras(0.3))
        assert len({await changed(), await changed(**loras(1.0)), await changed(**loras(0.3))}) == 3
        argv = ("-o", str(output), "--steps", "6", "--seed", "5", "--lora", "ink:0.3", PROMPT)
        assert await asyncio.to_thread(drawn_by_command, service, monkeypatch, *argv) == 0
        assert output.read_bytes() == weak
        changing = ("--image", str(output), "--strength", "0.7")
        assert (
            await asyncio.to_thread(drawn_by_command, service, monkeypatch, *changing, *argv) == 0
        )
        assert output.read_bytes() != weak
        for ours, param, message in (
            (loras(1.0, name="oil"), "loras[0].name", "'oil' is unknown; this model has ink"),
            (loras(1.0, 0.5), "loras[1].name", "is given twice"),
            (loras(99.0), "loras[0].scale", "<= 10"),
        ):
            error = await refusal(client, ours=ours)
            assert (error.status_code, error.param) == (400, param)
            assert message in error.message
        with pytest.raises(openai.BadRequestError, match="'oil'"):
            await changed(**loras(1.0, name="oil"))
        with pytest.raises(openai.BadRequestError, match="`loras`"):
            await client.images.edit(
                model=MODEL,
                prompt=PROMPT,
                image=("a.png", image),
                extra_body={**OURS, "loras": "ink"},
            )


@pytest.mark.long
async def test_images_steer_a_picture_by_the_names_of_what_reads_them(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    net = write_controlnet(folder, tmp_path / "net", 1)
    style = write_ip_adapter(folder, tmp_path / "ip", "style", 1)
    files = [
        base64.b64encode(to_file(Image.new("RGB", (SIZE, SIZE), colour))).decode()
        for colour in ("red", "blue")
    ]

    def lines(number: int = 0, **fields: Any) -> dict[str, Any]:
        return {"controlnets": [{"name": "lines", "image": files[number], **fields}]}

    def styled(number: int = 0, **fields: Any) -> dict[str, Any]:
        url = f"data:image/png;base64,{files[number]}"
        return {"ip_adapters": [{"name": "style", "image": url, **fields}]}

    ways: list[dict[str, Any]] = [
        *({}, {"scheduler": "ddim"}, lines(), lines(1), lines(scale=0.3), lines(end=0.5)),
        *(styled(), styled(1), styled(scale=0.3), lines() | styled()),
    ]
    settings: Any = {"controlnets": (f"lines={net}",), "ip_adapters": (f"style={style}",)}
    async with serving(folder, **settings) as service, service.client() as client:
        drawn = [(await pictures(client, ours))[0] for ours in ways]
        assert len(set(drawn)) == len(ways)
        together = await asyncio.gather(*(pictures(client, ours) for ours in ways))
        near = [pixels(a[0]) - pixels(b) for a, b in zip(together, drawn, strict=True)]
        assert max(abs(one).max() for one in near) <= 1
        for ours, param in (
            ({"scheduler": "slow"}, "scheduler"),
            (lines(name="oil"), "controlnets[0].name"),
            (lines(scale=99.0), "controlnets[0].scale"),
            (lines(start=0.5, end=0.5), "controlnets[0].end"),
            (lines(image="!"), "controlnets[0].image"),
            (lines(image=base64.b64encode(b"no picture").decode()), "controlnets[0].image"),
            (styled(name="oil"), "ip_adapters[0].name"),
            (styled(scale=99.0), "ip_adapters[0].scale"),
            (styled(image="data:,"), "ip_adapters[0].image"),
        ):
            error = await refusal(client, ours=ours)
            assert (error.status_code, error.param) == (400, param)
        body: Any = {
            "model": MODEL,
            "prompt": PROMPT,
            "image": ("a.png", base64.b64decode(files[0])),
        }
        form = {**OURS, **{name: json.dumps(value) for name, value in (lines() | styled()).items()}}
        changed = await client.images.edit(**body, extra_body=form)
        plain = await client.images.edit(**body, extra_body=OURS)
        assert decoded(changed.data[0]) != decoded(plain.data[0])
        image, output = tmp_path / "a:1.png", tmp_path / "drawn.png"  # a colon of the file's own
        image.write_bytes(base64.b64decode(files[0]))
        draw: Any = partial(asyncio.to_thread, drawn_by_command, service, monkeypatch)
        common = ("-o", str(output), "--steps", "6", "--seed", "5", *PROMPT.split())
        for flags, ours in (
            (("--scheduler", "ddim"), {"scheduler": "ddim"}),
            (("--controlnet", f"lines={image}"), lines()),
            (("--controlnet", f"lines={image}:0.3"), lines(scale=0.3)),
            (("--controlnet", f"lines={image}:1:0:0.5"), lines(end=0.5)),
            (("--ip-adapter", f"style={image}:0.3"), styled(scale=0.3)),
            (("--controlnet", f"lines={image}", "--ip-adapter", f"style={image}"), ways[-1]),
        ):
            assert await draw(*flags, *common) == 0
            (wanted,) = await pictures(client, ours)
            assert output.read_bytes() == wanted
        argv = ("--image", str(image), "--controlnet", f"lines={image}", *common)
        assert await draw(*argv) == 0
        assert await draw("--controlnet", f"oil={image}", *common) == 1
        assert "controlnets[0].name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "given", "message"),
    [
        (
            "--controlnet",
            "lines",
            "'lines' is no name and file; give NAME=FILE[:SCALE[:START:END]]",
        ),
        ("--controlnet", "=a.png", "'=a.png' is no name"),
        ("--controlnet", "lines=none.png:1", "'none.png:1' is not a file"),
        ("--controlnet", f"lines={__file__}:much", "'much' in"),
        ("--ip-adapter", f"style={__file__}:1:0", "is not a file; give NAME=FILE[:SCALE]"),
    ],
)
def test_an_image_that_steers_and_the_command_cannot_read(
    flag: str, given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draw", flag, given, PROMPT]) == 2
    error = capsys.readouterr().err
    assert f"{flag}: " in error
    assert message in error


@pytest.mark.parametrize(
    ("given", "message"),
    [("ink:much", "'much'"), (":1", "':1'")],
)
def test_an_adapter_that_the_command_cannot_read(
    given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draw", "--lora", given, PROMPT]) == 2
    assert f"--lora: {message}" in capsys.readouterr().err


async def test_a_form_with_another_file(service: Service) -> None:
    files = {"image": ("a.png", to_file(Image.new("RGB", (SIZE, SIZE)))), "sound": ("b.wav", b"x")}
    async with httpx.AsyncClient(
        trust_env=False, headers={"authorization": f"Bearer {KEY}"}
    ) as http:
        reply = await http.post(f"{service.url}/v1/images/edits", data={"prompt": "x"}, files=files)
    assert reply.status_code == 400
    assert (
        reply.json()["error"]["message"]
        == "`sound` must not be a file; only `image` and `mask` may be"
    )


REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "nobody"}, 404, "model", "is no diffusion model here; there are: tiny-draw"),
    ({"prompt": ""}, 400, "prompt", "length >= 1"),
    ({"n": 11}, 400, "n", "<= 10 (value 11)"),
    ({"n": 0}, 400, "n", ">= 1 (value 0)"),
    ({"size": "big"}, 400, "size", "`size` 'big'"),
    ({"size": "99999x99999"}, 413, "size", "size: 99999x99999 is more than 16384 pixels"),
    ({"size": "17x16"}, 400, "size", "multiples of 2"),
    ({"ours": {"steps": 5000}}, 400, "steps", "steps: 5000; give 1 to 2000"),
    ({"ours": {"steps": 0}}, 400, "steps", "`steps`: expected `int` >= 1"),
    ({"ours": {"guidance_scale": 1e9}}, 400, "guidance_scale", "<= 100"),
    ({"ours": {"strength": 0.5}}, 400, "strength", "unknown parameter `strength`; remove it"),
    ({"response_format": "url"}, 400, "response_format", "b64_json"),
    ({"quality": "hd"}, 400, "quality", "`steps`"),
    ({"background": "transparent"}, 400, "background", "opaque"),
    ({"style": "vivid"}, 400, "style", "unknown parameter `style`"),
    ({"partial_images": 2}, 400, "partial_images", "needs `stream`"),
    ({"stream": True, "n": 2}, 400, "n", "`stream`"),
]


async def test_refusals(service: Service) -> None:
    async with service.client() as client:
        for fields, status, param, message in REFUSED:
            error = await refusal(client, **fields)
            assert (error.status_code, error.param) == (status, param), fields
            assert message in error.message, fields
            assert not service.painters[0].thread.engine.passes, fields


async def test_a_client_that_leaves_stops_it(service: Service) -> None:
    engine = service.painters[0].thread.engine
    async with service.client() as client:
        task = asyncio.create_task(pictures(client, {"steps": 2000}, n=2))
        async with asyncio.timeout(30):
            while engine.passes < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            while engine.has_work or service.gateway.service.limits.active:  # type: ignore[union-attr]  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    assert engine.passes < 1500
    service.painters[0].check_integrity()


def drawn_by_command(service: Service, monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setenv("MOTET_API_KEY", KEY)
    return main(["draw", "--url", service.url, *argv])


async def test_the_command_draws(
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with service.client() as client:
        (wanted,) = await pictures(client)
    output, changed = tmp_path / "a.png", tmp_path / "b.webp"
    common = ("--steps", "6", "--seed", "5", *PROMPT.split())
    run = asyncio.to_thread
    assert await run(drawn_by_command, service, monkeypatch, "-o", str(output), *common) == 0
    assert output.read_bytes() == wanted
    assert capsys.readouterr().out.strip() == str(output)
    argv = ("-o", str(changed), "--image", str(output), "--strength", "0.6", *common)
    assert await run(drawn_by_command, service, monkeypatch, *argv) == 0
    assert Image.open(BytesIO(changed.read_bytes())).format == "WEBP"
    assert (
        await run(drawn_by_command, service, monkeypatch, "-o", str(tmp_path / "a.gif"), *common)
        == 2
    )
    assert "end it with .png" in capsys.readouterr().err
    assert await run(drawn_by_command, service, monkeypatch, "--size", "1x1", *common) == 1
    assert "multiples of 2" in capsys.readouterr().err


async def test_progress_is_told_to_those_who_ask(service: Service) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, "progress": True, **OURS}
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(trust_env=False) as http:
        reply = await http.post(
            f"{service.url}/v1/images/generations", json=body, headers=headers, timeout=60
        )
    events = [json.loads(line[5:]) for line in reply.text.splitlines() if line.startswith("data:")]
    assert [event["step"] for event in events[:-1]] == [1, 2, 3, 4, 5, 6]
    assert {event["type"] for event in events[:-1]} == {"image_generation.progress"}
    assert events[-1]["type"] == "image_generation.completed"
