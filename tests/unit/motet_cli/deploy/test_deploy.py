"""`motet deploy`: what it makes of compose.yaml for Kubernetes and Swarm is well-formed and complete."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import pytest
import yaml

from motet_cli.deploy.compose import substitute, variables
from motet_cli.deploy.kubernetes import kubernetes_files
from motet_cli.deploy.large_model import GPUS, HOSTS, IMAGE, vllm_arguments
from motet_cli.deploy.swarm import STACK_FILE, swarm_files
from motet_cli.main import main
from motet_engines.config import EnginesConfig
from motet_shared.credentials import SHARED, USERS
from motet_shared.process.config import load

ROOT = Path(__file__).parents[4]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
KUBERNETES, SWARM = kubernetes_files({}), swarm_files()
STACK = yaml.safe_load(SWARM[STACK_FILE])
MANIFESTS: list[dict[str, Any]] = [
    document
    for name, text in sorted(KUBERNETES.items())
    if name.endswith(".yaml") and name not in ("kustomization.yaml", "large-model.yaml")
    for document in yaml.safe_load_all(text)
]


def of_kind(*kinds: str) -> dict[str, dict[str, Any]]:
    """Manifests by name."""
    return {
        manifest["metadata"]["name"]: manifest
        for manifest in MANIFESTS
        if manifest["kind"] in kinds
    }


@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda one: f"{one['kind']} {one['metadata']['name']}"
)
def test_a_manifest_is_what_kubernetes_takes(manifest: dict[str, Any]) -> None:
    if manifest["kind"] != "ScaledObject":  # KEDA's, whose schema is not Kubernetes'
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_what_is_scaled_by_load_says_no_number() -> None:
    """Each `apply` would undo what KEDA has done."""
    scaled, deployments = of_kind("ScaledObject"), of_kind("Deployment")
    assert scaled
    for name, manifest in scaled.items():
        assert manifest["spec"]["scaleTargetRef"] == {"name": name}
        assert "replicas" not in deployments[name]["spec"]


def test_every_service_of_the_compose_file_is_there() -> None:
    ours = {
        name
        for name, one in COMPOSE.items()
        if not name.endswith("-gpu") and "motet-" in one["image"]
    } - {
        "store",
        "credentials",
    }
    assert set(of_kind("Deployment")) == ours
    assert set(STACK["services"]) == ours | {
        "nats",
        "store",
    }


def test_nothing_secret_is_in_a_rendered_file() -> None:
    assert "MOTET_API_KEY:" not in SWARM[STACK_FILE]
    assert not [
        name for name, text in (KUBERNETES | SWARM).items() if "MOTET_NATS_PASSWORD" in text
    ]
    pods = [
        one["spec"]["template"]["spec"] for one in of_kind("Deployment", "StatefulSet").values()
    ]
    environment = [
        entry for pod in pods for container in pod["containers"] for entry in container["env"]
    ]
    hidden = {entry["name"] for entry in environment if "valueFrom" in entry}
    assert hidden == {"MOTET_API_KEY"}
    assert not hidden & {entry["name"] for entry in environment if "value" in entry}


def test_a_role_has_the_passwords_of_its_own_users_alone() -> None:
    for name, manifest in of_kind("Deployment").items():
        volumes = manifest["spec"]["template"]["spec"]["volumes"]
        assert [one["secret"]["secretName"] for one in volumes if "secret" in one] == [
            f"motet-nats-{name}"
        ]
    (config,) = of_kind("StatefulSet")["nats"]["spec"]["template"]["spec"]["volumes"]
    assert config["projected"]["sources"][1]["secret"]["name"] == "motet-nats-server"
    for name, service in STACK["services"].items():
        found = {one["source"] for one in service.get("secrets", ())} - {"motet_api_keys"}
        users = {"nats": ("server",), "store": ()}.get(name, SHARED.get(name, (name,)))
        assert found == {f"motet_nats_{user}" for user in users}
    assert STACK["secrets"].keys() == {"motet_api_keys", "motet_nats_server"} | {
        f"motet_nats_{user}" for user in USERS if user != "operator"
    }


def test_the_kustomization_names_every_file() -> None:
    named = yaml.safe_load(KUBERNETES["kustomization.yaml"])
    files = set(KUBERNETES) - {"kustomization.yaml", "autoscaling.yaml", "large-model.yaml"}
    assert {*named["resources"], *named["configMapGenerator"][0]["files"]} == files


def test_the_configs_of_the_stack_file_lie_beside_it() -> None:
    files = {config["file"] for config in STACK["configs"].values()}
    assert files == {f"./{name}" for name in SWARM if name != STACK_FILE} != set()


def test_the_command_writes_the_files_with_values_of_variables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "kubernetes"
    chosen = ("--set", "MOTET_LLM=org-model", "--set", "MOTET_TAG=1.2.3")
    assert main(["deploy", "kubernetes", str(folder), *chosen]) == 0
    assert {path.name for path in folder.iterdir()} == set(KUBERNETES)
    (decode, _) = yaml.safe_load_all((folder / "decode.yaml").read_text())
    (container,) = decode["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "motet-llm:1.2.3"
    assert "/models/org-model" in [one.get("value") for one in container["env"]]
    assert main(["deploy", "swarm", str(tmp_path / "swarm")]) == 0
    written = {path.name: path.read_text() for path in (tmp_path / "swarm").iterdir()}
    assert written == SWARM
    assert "kubectl apply -k" in capsys.readouterr().out


def test_what_cannot_be_set_or_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for args, word in (
        (("kubernetes", str(tmp_path / "x"), "--set", "MOTET_NONE=1"), "--set"),
        (("kubernetes", str(tmp_path / "x"), "--set", "MOTET_LLM"), "--set"),
        (("kubernetes", str(tmp_path / "x"), "--set", "MOTET_LLM=${MOTET_LLM:-x}"), "--set"),
        (("swarm", str(tmp_path / "file")), "FOLDER"),
    ):
        assert main(["deploy", *args]) == 2
        assert word in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_variables_have_their_defaults_inner_ones_first() -> None:
    assert variables()["MOTET_LLM"] == "pocket-chat"
    assert substitute("${A:-${B:-x}}/${C:-y}", {}) == "x/y"
    assert substitute("${A:-${B:-x}}/${C:-y}", {"B": "b", "C": ""}) == "b/"
    assert substitute("${A:-${B:-x}}", {"A": "a", "B": "b"}) == "a"


# ----------------------------------------------------------------------------------- models larger than a host
POD_TEMPLATE = {"type": "object", "required": ["metadata", "spec"]}
# What the LeaderWorkerSet API (leaderworkerset.x-k8s.io/v1) says of the fields that are rendered.
GROUP = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "spec": {
            "type": "object",
            "required": ["leaderWorkerTemplate"],
            "additionalProperties": False,
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "required": ["workerTemplate"],
                    "additionalProperties": False,
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {"enum": ["None", "RecreateGroupOnPodRestart"]},
                        "leaderTemplate": POD_TEMPLATE,
                        "workerTemplate": POD_TEMPLATE,
                    },
                },
            },
        },
    },
}
LARGE = list(yaml.safe_load_all(KUBERNETES["large-model.yaml"]))


def test_a_model_on_several_hosts_is_what_kubernetes_takes(tmp_path: Path) -> None:
    group, service, host = LARGE
    assert jsonschema_rs.is_valid(GROUP, group)
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"], template["workerTemplate"]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", **one, "metadata": {"name": "x", **one["metadata"]}}
        for one in (leader, worker)
    ]
    for manifest in (service, host, *pods):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    assert service["spec"]["selector"] == leader["metadata"]["labels"]
    assert service["spec"]["selector"] != worker["metadata"]["labels"]
    for pod in (leader, worker):
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": str(GPUS)}
    (container,) = host["spec"]["template"]["spec"]["containers"]
    env = {one["name"]: one["value"] for one in container["env"]}
    assert env["MOTET_ENGINE_URL"] == f"http://{service['metadata']['name']}:8000/v1"
    (tmp_path / "config.json").write_text("{}")
    read = load(EnginesConfig, [], {**env, "MOTET_MODEL": str(tmp_path)})  # it takes them all
    assert (read.engine, read.engine_dialect) == ("openai", "vllm")


def test_hosts_have_the_same_arguments_under_compose() -> None:
    """`docker compose config` takes the file, where Compose is installed."""
    path, chosen = ROOT / "deploy" / "vllm-two-hosts.yaml", {"MOTET_LEADER": "192.0.2.1"}
    text = path.read_text()
    if shutil.which("docker-compose"):
        text = subprocess.run(
            [
                "docker-compose",
                "-f",
                str(path),
                "--profile",
                "leader",
                "--profile",
                "worker",
                "config",
            ],
            env={**os.environ, **chosen},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
    else:
        text = substitute(text, chosen)
    services = yaml.safe_load(text)["services"]
    for rank, name in enumerate(("leader", "worker")):
        due = vllm_arguments("/models/my-model", str(rank), "192.0.2.1")
        assert services[name]["command"] == due
        assert services[name]["image"] == IMAGE
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
    assert len(services) == HOSTS
