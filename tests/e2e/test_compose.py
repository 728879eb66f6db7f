"""compose.yaml on a real Docker engine: the same chat from containers, with two decode instances, and speech.

Images are built without an image registry (tests/containers). The first run takes minutes, later ones seconds.
"""

import asyncio
import json
import re
import shutil
from base64 import b64decode, b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import httpx
import nats
import openai
import pytest
import websockets
from PIL import Image

from containers.engine import Docker
from containers.images import NATS, TAG
from e2e.readme import compose_options
from e2e.stack import fetch, until
from motet_cli.deploy.autoscaling import AUTOSCALED
from motet_media.audio import duration_ms
from motet_shared.testing import free_port
from recipes.world.pictures import draw_things
from recipes.world.scenes import Thing
from render_dashboard import ROWS
from support.checkpoints import diffusion_checkpoints, embedding_checkpoints, tts_checkpoints
from support.checkpoints.asr_checkpoints import tiny_whisper
from support.clients.realtime_client import Client, kinds
from support.media.picture_files import encoded
from support.media.spoken import say, silence, wav

pytestmark = [
    pytest.mark.long,
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.xdist_group("docker"),
]

ROOT = Path(__file__).parents[2]
PROJECT = "motet-test"
MODEL, SPEAKERS = "pocket-chat", "pocket-speakers"
ASR_MODEL, VOICE, BRUSH, VECTORS = "ears", "voice", "brush", "vectors"
PNG = b"\x89PNG"
QUESTION = "Count to twenty."  # many tokens: a short answer may well arrive in one piece


@dataclass
class Containers:
    """The stack of compose.yaml, with its gateway published on a free port."""

    docker: Docker
    port: int
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def compose(self, *args: str) -> str:
        settings = {
            "MOTET_TAG": TAG,
            "NATS_IMAGE": NATS,
            "MOTET_PUBLISH": f"127.0.0.1:{self.port}",
            "COMPOSE_PROFILES": "speakers,images,embedding",
            "MOTET_MODELS_DIR": str(self.folder),
            "MOTET_ASR": ASR_MODEL,
            "MOTET_TTS": VOICE,
            "MOTET_DRAW": BRUSH,
            "MOTET_EMBED": VECTORS,
            **{f"MOTET_{role}_THREADS": "1" for role in ("DECODE", "ASR", "TTS", "DRAW", "EMBED")},
        }
        return self.docker.compose(
            "--file", str(ROOT / "compose.yaml"), "--project-name", PROJECT, *args, env=settings
        )

    def ids(self, service: str) -> list[str]:
        labels = {"project": PROJECT, "service": service}
        filters = [
            part
            for key, value in labels.items()
            for part in ("--filter", f"label=com.docker.compose.{key}={value}")
        ]
        return self.docker.run("ps", "--quiet", *filters).split()

    def address(self, service: str) -> str:
        """Of the first container of a service, on the network that only this machine and the containers are on."""
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return self.docker.run("inspect", "--format", form, self.ids(service)[0]).strip()

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = fetch(f"{self.url}/health/ready").json()
        return found

    @cached_property
    def operator_password(self) -> str:
        """From the volume that no service mounts."""
        volume, image = f"{PROJECT}_nats-operator:/nats:ro", f"motet-gateway:{TAG}"
        said = self.docker.run(
            "run", "--rm", "--user=0", "-v", volume, "--entrypoint=cat", image, "/nats/operator"
        )
        return said.split()[-1]  # warnings of the engine come first

    def models(self) -> set[str]:
        found = fetch(f"{self.url}/v1/models").json()
        return {model["id"] for model in found["data"]}

    def ready(self) -> bool:
        try:
            return bool(self.health()["status"] == "ready")
        except httpx.HTTPError:
            return False

    def decode_requests(self) -> dict[str, int]:
        """Requests that each decode instance has seen, by the NATS service API."""
        return asyncio.run(self._ask_decode())

    async def _ask_decode(self) -> dict[str, int]:
        client = await nats.connect(
            f"nats://{self.address('nats')}:4222",
            user="operator",
            password=self.operator_password,
            connect_timeout=30,
        )
        try:
            inbox = client.new_inbox()
            answers = await client.subscribe(inbox)
            await client.publish("$SRV.STATS.motet-decode", b"", reply=inbox)
            found: dict[str, int] = {}
            while True:
                try:
                    answer = json.loads((await answers.next_msg(timeout=1)).data)
                except TimeoutError:
                    return found
                found[answer["id"]] = sum(
                    endpoint["num_requests"] for endpoint in answer["endpoints"]
                )
        finally:
            await client.close()


def checkpoints(folder: Path) -> Path:
    """What MOTET_MODELS_DIR holds: models that come along, and tiny ones with random weights for all else.

    Readable by everybody: the services run as a user of their own.
    """
    for name in (MODEL, SPEAKERS):
        shutil.copytree(ROOT / "models" / name, folder / name)
    tiny_whisper(folder / ASR_MODEL)
    tts_checkpoints.pocket_tts(folder / VOICE, sample=True, threshold=0.2)
    diffusion_checkpoints.stable_diffusion(folder / BRUSH)
    embedding_checkpoints.sentence_transformer(folder / VECTORS)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture(scope="module")
def containers(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    models = checkpoints(tmp_path_factory.mktemp("models"))
    found = Containers(docker, free_port(), models)
    try:
        # As the README says it, but with the images that are there.
        options = [option for option in compose_options() if option != "--build"]
        assert options == ["--scale", "decode=2"]
        found.compose("up", "--detach", "--no-build", *options)
        until(found.ready, "the gateway is ready", 300)
        until(lambda: len(found.decode_requests()) == 2, "both decode instances are up", 120)
        until(lambda: not found.health()["speech"]["missing"], "it hears and speaks", 120)
        until(lambda: {BRUSH, VECTORS} <= found.models(), "it draws and embeds", 120)
        until(lambda: not found.health()["images"]["missing"], "it sees", 120)
        yield found
    except Exception as error:
        error.add_note(found.compose("logs", "--no-color", "--tail", "20"))
        raise
    finally:
        found.compose("down", "--volumes", "--timeout", "10")


def stream_chat(url: str) -> list[str]:
    """The pieces of an answer, as the official client gets them."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            stream=True,
        )
        return [
            piece for chunk in stream for choice in chunk.choices if (piece := choice.delta.content)
        ]


def test_a_chat_streams_through_the_containers(containers: Containers) -> None:
    pieces = stream_chat(containers.url)
    assert len(pieces) > 1
    assert "twenty" in "".join(pieces).lower()


def test_both_decode_instances_serve(containers: Containers) -> None:
    before = containers.decode_requests()
    assert len(before) == 2
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(stream_chat, [containers.url] * 16))
    assert {"".join(pieces) for pieces in answers} == {"".join(answers[0])}
    after = containers.decode_requests()
    assert all(after[instance] > before[instance] for instance in before)


def test_the_chat_goes_on_when_a_decode_container_dies(containers: Containers) -> None:
    containers.docker.run("kill", containers.ids("decode")[0])
    for _ in range(4):
        assert "twenty" in "".join(stream_chat(containers.url)).lower()


def test_speech_goes_out_and_comes_in(containers: Containers) -> None:
    """The words of random weights mean nothing; that there is sound, and that it is heard, is seen."""
    spoken = say("Two red circles and a blue square.")
    with openai.OpenAI(
        base_url=f"{containers.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        reply = client.audio.speech.create(
            model=VOICE, voice="anna", input="Two. " * 20, response_format="pcm"
        )
        assert any(reply.read())
        text = client.audio.transcriptions.create(
            model=ASR_MODEL,
            file=("said.wav", wav(spoken)),
            language="en",
            response_format="verbose_json",
        )
    assert text.duration == pytest.approx(duration_ms(len(spoken), 24_000) / 1000, abs=0.1)
    assert text.text


async def test_a_spoken_turn_is_answered_aloud(containers: Containers) -> None:
    url = f"ws://127.0.0.1:{containers.port}/v1/realtime?model={MODEL}"
    async with websockets.connect(url, proxy=None, max_size=None) as socket:
        client = Client(socket)
        await client.until("session.created")
        await client.audio(silence(500) + say("Two red circles and a blue square.") + silence(1500))
        events = await client.until("response.output_audio.delta", "response.done")
    seen = kinds(events)
    assert seen[:3] == [
        f"input_audio_buffer.{kind}" for kind in ("speech_started", "speech_stopped", "committed")
    ]
    assert seen[-1] == "response.output_audio.delta"


def test_a_picture_is_drawn_and_texts_become_vectors(containers: Containers) -> None:
    with openai.OpenAI(
        base_url=f"{containers.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        drawn = client.images.generate(
            model=BRUSH, prompt="two red circles", extra_body={"steps": 2, "seed": 1}
        )
        vectors = client.embeddings.create(model=VECTORS, input=["ba be", "be ba"])
    assert drawn.data
    assert b64decode(drawn.data[0].b64_json or "").startswith(PNG)
    one, other = (found.embedding for found in vectors.data)
    assert one != other
    assert sum(number**2 for number in one) == pytest.approx(1, abs=1e-3)


def test_a_picture_is_seen(containers: Containers) -> None:
    """Its bytes go from the gateway to the encoder service, and its embeddings to the engine."""
    circle = Thing(shape="circle", colour="red", size="large", column=1, row=1)
    picture = encoded(Image.fromarray(draw_things([circle], Random(5))))
    url = "data:image/png;base64," + b64encode(picture).decode()
    question = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What shape is it?"},
    ]
    with openai.OpenAI(
        base_url=f"{containers.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        reply = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],  # type: ignore[misc, list-item]
            temperature=0,
        )
    assert "circle" in (reply.choices[0].message.content or "")


def test_the_dashboard_shows_what_is_measured(containers: Containers) -> None:
    roles = (
        "gateway",
        "tokenizer",
        "decode",
        "encoder",
        "asr",
        "vad",
        "tts",
        "diffusion",
        "embedding",
    )
    pages = [fetch(f"http://{containers.address(role)}:9100/metrics").text for role in roles]
    measured = {
        line.split("{")[0].split(" ")[0]
        for page in pages
        for line in page.splitlines()
        if line[:1] != "#"
    }
    expressions = [
        series[0] for panels in ROWS.values() for panel in panels for series in panel.series
    ]
    expressions += [load.query for load in AUTOSCALED.values()]
    wanted = {name for text in expressions for name in re.findall(r"\b(?:motet|process)_\w+", text)}
    assert len(wanted) > 15
    assert wanted <= measured


def test_containers_are_confined(containers: Containers) -> None:
    """What the compose file promises, as the engine sees it."""
    for service in (
        "nats",
        "gateway",
        "tokenizer",
        "decode",
        "vad",
        "asr",
        "tts",
        "encoder",
        "diffusion",
        "embedding",
    ):
        [seen] = json.loads(containers.docker.run("inspect", containers.ids(service)[0]))
        assert seen["Config"]["User"] not in ("", "root", "0"), service
        assert seen["HostConfig"]["ReadonlyRootfs"], service
        assert seen["HostConfig"]["CapDrop"] == ["ALL"], service


def test_images_carry_only_what_their_service_needs(containers: Containers) -> None:
    list_all = "import importlib.metadata as m; print(*{d.metadata['Name'].lower() for d in m.distributions()})"

    def packages(service: str) -> set[str]:
        return set(
            containers.docker.run(
                "exec", containers.ids(service)[0], "python", "-c", list_all
            ).split()
        )

    gateway, tokenizer, llm = packages("gateway"), packages("tokenizer"), packages("decode")
    assert {"motet", "fastapi"} <= gateway
    assert not gateway & {"torch", "transformers", "pytest"}
    assert {"motet", "transformers"} <= tokenizer
    assert not tokenizer & {"torch", "fastapi"}
    assert {"motet", "torch"} <= llm
    assert "fastapi" not in llm
    vad = packages("vad")
    assert {"motet", "silero-vad", "onnxruntime"} <= vad
    assert not vad & {"torch", "transformers", "fastapi"}
    asr, tts = packages("asr"), packages("tts")
    assert {"motet", "torch", "transformers", "av"} <= asr
    assert {"motet", "torch", "transformers", "num2words"} <= tts
    assert not (asr | tts) & {"fastapi", "onnxruntime", "torchaudio"}
    # Build arguments may hold an address with a password: nothing of them may stay in the image.
    history = containers.docker.run("history", "--no-trunc", f"motet-gateway:{TAG}")
    assert "PIP_FIND_LINKS" not in history


def test_jobs_outlive_the_containers(containers: Containers) -> None:
    """The last one: what it restarts has a memory of its own then, and the others go on over TCP."""
    jobs = f"{containers.url}/v1/images/jobs"
    job = {"id": "kept", "prompt": "two red circles"}
    assert httpx.post(jobs, json=job, trust_env=False, timeout=30).status_code == 202
    containers.compose("restart", "--timeout", "10", "nats", "gateway")
    until(containers.ready, "the gateway is ready again", 120)
    found = fetch(f"{jobs}/kept").json()
    assert (found["id"], found["object"]) == ("kept", "image.job")
