"""What `motet deploy swarm` writes, on a Docker engine: a Swarm of one node, whose services are scaled and rolled."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from containers.engine import Docker
from containers.images import NATS, TAG
from e2e.stack import fetch, until
from motet_cli.deploy.command import write
from motet_cli.deploy.swarm import STACK_FILE, swarm_files
from motet_shared.credentials import SERVER_FILE, make_passwords
from motet_shared.testing import free_port
from support.checkpoints.asr_checkpoints import tiny_whisper
from support.media.spoken import say, wav

pytestmark = [
    pytest.mark.long,
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.xdist_group("docker"),
]

MODEL, EARS = "pocket-chat", "ears"
KEY = "sesame"
HEADERS = {"authorization": f"Bearer {KEY}"}
CLIENTS = 4


@dataclass
class Swarm:
    """The stack of swarm.yaml, with its gateway published on a free port of this machine."""

    docker: Docker
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = KEY) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120
        )

    def ready(self) -> bool:
        try:
            return fetch(f"{self.url}/health/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def models(self) -> set[str]:
        found = fetch(f"{self.url}/v1/models", HEADERS).json()
        return {model["id"] for model in found["data"]}

    def instances(self, role: str) -> set[str]:
        """Those that are ready, as the gateway knows them."""
        told = fetch(f"{self.url}/metrics/stack", HEADERS).json()
        return {
            one["instance"]
            for one in told["instances"]
            if one["role"] == role and one["state"] == "ready"
        }


@pytest.fixture(scope="module")
def swarm(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    docker.run("swarm", "init", "--advertise-addr", "127.0.0.1")
    try:
        yield deploy(docker, models(tmp_path_factory.mktemp("models")))
    except Exception as error:
        error.add_note(docker.run("stack", "ps", "--no-trunc", "motet"))
        raise
    finally:
        docker.run("stack", "rm", "motet", timeout=120)
        docker.run("swarm", "leave", "--force", timeout=120)


def models(folder: Path) -> Path:
    """What chats and what listens; readable by everybody."""
    shutil.copytree(Path(__file__).parents[2] / "models" / MODEL, folder / MODEL)
    tiny_whisper(folder / EARS)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def deploy(docker: Docker, folder: Path) -> Swarm:
    """As the head of the file says it."""
    node = docker.run("node", "ls", "--format", "{{.ID}}").strip()
    docker.run("node", "update", "--label-add", "motet.store=true", node)
    passwords = make_passwords(folder.with_name("credentials"))
    server = (folder.with_name("credentials") / SERVER_FILE).read_bytes()
    for user, secret in {
        "server": server,
        **{user: text.encode() for user, text in passwords.items()},
    }.items():
        docker.run("secret", "create", f"motet_nats_{user}", "-", stdin=secret)
    docker.run("secret", "create", "motet_api_keys", "-", stdin=KEY.encode())
    found = Swarm(docker, free_port())
    settings = {
        "MOTET_TAG": TAG,
        "NATS_IMAGE": NATS,
        "MOTET_PORT": str(found.port),
        "MOTET_PUBLISH_MODE": "host",  # a mesh needs firewall rules, which the tests leave alone
        "MOTET_MODELS_DIR": str(folder),
        "MOTET_ASR": EARS,
        "MOTET_TTS": "none",
        "MOTET_DECODE_THREADS": "1",
        "MOTET_ASR_THREADS": "1",
        **{f"MOTET_{role}_REPLICAS": "0" for role in ("ENCODER", "TTS", "VAD")},
    }
    files = folder.with_name("swarm")
    write(files, swarm_files())
    docker.stack("motet", files / STACK_FILE, settings)
    until(found.ready, "the gateway is ready", 300)
    until(lambda: {MODEL, EARS} <= found.models(), "it chats and listens", 120)
    return found


async def chat(swarm: Swarm) -> str:
    async with swarm.client() as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count to twenty."}],
            temperature=0,
            stream=True,
        )
        return "".join(
            [
                piece
                async for chunk in stream
                for one in chunk.choices
                if (piece := one.delta.content)
            ]
        )


async def test_nobody_gets_in_without_the_key(swarm: Swarm) -> None:
    assert "twenty" in (await chat(swarm)).lower()
    async with swarm.client("another") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_a_file_crosses_from_one_container_to_another(swarm: Swarm) -> None:
    """In a Swarm no two containers share memory."""
    async with swarm.client() as client:
        heard = await client.audio.transcriptions.create(
            model=EARS,
            file=("said.wav", wav(say("Two red circles."))),
            response_format="verbose_json",
        )
    assert heard.text


async def test_a_service_is_scaled_and_rolled_under_load(swarm: Swarm) -> None:
    """Every reply is whole while decode grows to two and both are replaced."""
    due = await chat(swarm)
    replies: list[str] = []
    stop = asyncio.Event()

    async def talk() -> None:
        while not stop.is_set():
            replies.append(await chat(swarm))

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(talk())
        try:
            before = await asyncio.to_thread(swarm.instances, "decode")
            await asyncio.to_thread(
                swarm.docker.run, "service", "scale", "--detach", "motet_decode=2"
            )
            await asyncio.to_thread(
                until, lambda: len(swarm.instances("decode")) == 2, "there are two", 120
            )
            await asyncio.to_thread(
                swarm.docker.run,
                "service",
                "update",
                "--force",
                "--quiet",
                "motet_decode",
                timeout=900,
            )
            after = await asyncio.to_thread(swarm.instances, "decode")
        finally:
            stop.set()
    assert not before & after
    assert len(replies) >= 2 * CLIENTS
    assert set(replies) == {due}
