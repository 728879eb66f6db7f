"""Each actuator, against what it speaks to: a program with the command line of compose, and an API server over TLS."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from motet_planner.actuators.actuator import ActuatorError
from motet_planner.actuators.kubernetes import Cluster, Kubernetes
from motet_planner.actuators.program import Compose, Local, output_of, parse_command
from motet_shared.errors import ConfigError
from support.peers.kubernetes_api import KubernetesApi
from support.running.refusals import refuses

# Keeps the number of containers by service in a file, as compose would keep containers.
DOCKER = """
import argparse, json, pathlib, sys
state = pathlib.Path(__file__).with_name("containers.json")
counts = json.loads(state.read_text())
top = argparse.ArgumentParser(prog="docker compose")
top.add_argument("--project-name", required=True)
commands = top.add_subparsers(dest="command", required=True)
ps = commands.add_parser("ps")
ps.add_argument("--quiet", action="store_true", required=True)
ps.add_argument("service")
up = commands.add_parser("up")
for flag in ("--detach", "--no-deps", "--no-recreate", "--no-build"):
    up.add_argument(flag, action="store_true", required=True)
up.add_argument("--scale", required=True)
up.add_argument("service")
args = top.parse_args()
if args.service not in counts:
    sys.exit(f"no such service: {args.service}")
if args.command == "ps":
    print(*[f"{i:012x}" for i in range(counts[args.service])], sep="\\n")
else:
    name, count = args.scale.split("=")
    assert name == args.service
    state.write_text(json.dumps({**counts, name: int(count)}))
"""


class World:
    def __init__(self, folder: Path):
        self._state = folder / "containers.json"
        self._state.write_text(json.dumps({"decode": 1, "tts": 2}))
        program = folder / "docker.py"
        program.write_text(DOCKER)
        self.compose = Compose((sys.executable, str(program), "--project-name", "it"))

    @property
    def containers(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(self._state.read_text())
        return found


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_compose_scales_one_service_and_leaves_the_others(world: World) -> None:
    assert await world.compose.count("decode") == 1
    await world.compose.scale("decode", 3)
    assert world.containers == {"decode": 3, "tts": 2}
    assert await world.compose.count("decode") == 3
    await world.compose.scale("decode", 0)
    assert await world.compose.count("decode") == 0


async def test_what_compose_says_is_told(world: World) -> None:
    with pytest.raises(ActuatorError, match="--scale asr=2 asr"):
        await world.compose.scale("asr", 2)
    with pytest.raises(ActuatorError, match="nowhere/docker"):
        await Compose(("nowhere/docker",)).count("decode")
    with pytest.raises(ActuatorError, match=r"0\.2 s"):
        await output_of([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)


async def test_local_asks_motet(tmp_path: Path) -> None:
    program = tmp_path / "motet.py"
    program.write_text(
        "import sys, pathlib; pathlib.Path(__file__).with_name('said').write_text(' '.join(sys.argv[1:]))"
    )
    local = Local("http://127.0.0.1:8123", (sys.executable, str(program)))
    assert await local.count("decode") is None
    await local.scale("decode", 3)
    assert (tmp_path / "said").read_text() == "scale decode=3 --url http://127.0.0.1:8123"


async def test_local_tells_that_nothing_runs_there() -> None:
    """The command line itself, and nobody who would listen."""
    with pytest.raises(ActuatorError, match=r"http://127\.0\.0\.1:1"):
        await Local("http://127.0.0.1:1").scale("decode", 2)


def test_commands_are_words() -> None:
    assert parse_command("docker compose -f 'my file.yaml'", "compose") == (
        "docker",
        "compose",
        "-f",
        "my file.yaml",
    )
    for text in ("", "docker 'x"):
        with refuses(ConfigError, "compose"):
            parse_command(text, "compose")


# ---------------------------------------------------------------------------------------------------------- Kubernetes
@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubernetesApi]:
    with KubernetesApi(tmp_path).running() as found:
        found.replicas = {"decode": 1, "tts": 2}
        yield found


async def test_kubernetes_patches_the_scale(api: KubernetesApi) -> None:
    actuator = Kubernetes(Cluster.of_this_pod(api.account, api.environ))
    assert await actuator.count("decode") == 1
    await actuator.scale("decode", 5)
    assert api.replicas == {"decode": 5, "tts": 2}
    api.renew("second")
    await actuator.scale("decode", 0)
    assert await actuator.count("decode") == 0
    assert api.requests[1] == ("PATCH", "/apis/apps/v1/namespaces/motet/deployments/decode/scale")
    await actuator.close()


async def test_what_the_api_says_is_told(api: KubernetesApi, tmp_path: Path) -> None:
    cluster = Cluster.of_this_pod(api.account, api.environ)
    actuator = Kubernetes(cluster)
    with pytest.raises(ActuatorError, match="404"):
        await actuator.scale("asr", 2)
    with pytest.raises(ActuatorError, match=r"422: spec\.replicas"):
        await actuator.scale("decode", -1)
    api.token = "another"
    with pytest.raises(ActuatorError, match="401"):
        await actuator.count("decode")
    api.renew("third")
    with pytest.raises(ActuatorError, match="403"):
        await Kubernetes(replace(cluster, namespace="default")).scale("decode", 2)
    with pytest.raises(ActuatorError):
        await Kubernetes(replace(cluster, token_file=tmp_path / "none")).scale("decode", 2)
    with pytest.raises(ActuatorError, match="GET /apis"):
        await Kubernetes(replace(cluster, url="https://127.0.0.1:1")).count("decode")
    assert api.replicas == {"decode": 1, "tts": 2}


async def test_another_certificate_is_not_trusted(api: KubernetesApi, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = KubernetesApi(tmp_path / "other")
    cluster = Cluster.of_this_pod(api.account, api.environ)
    with pytest.raises(ActuatorError, match="CERTIFICATE_VERIFY_FAILED"):
        await Kubernetes(replace(cluster, ca_file=other.account / "ca.crt")).count("decode")
    assert not api.requests
    other._server.server_close()


def test_outside_of_a_pod_it_is_refused(tmp_path: Path) -> None:
    with refuses(ConfigError, "actuator"):
        Cluster.of_this_pod(tmp_path, {})
    with refuses(ConfigError, "actuator"):
        Cluster.of_this_pod(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    (tmp_path / "namespace").write_text("x")
    cluster = Cluster.of_this_pod(tmp_path, {"KUBERNETES_SERVICE_HOST": "fd00::1"})
    assert cluster.url == "https://[fd00::1]:443"
    with refuses(ConfigError, "actuator"):
        Kubernetes(cluster)
