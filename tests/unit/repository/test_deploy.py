"""What is made of compose.yaml for Swarm and Kubernetes, and of code for Grafana: up to date, and well-formed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import render_dashboard
import render_kubernetes
import render_swarm
from motet_shared.credentials import SHARED, USERS

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
RENDERED = {**render_swarm.rendered_files(), **render_kubernetes.rendered_files()}
MANIFESTS: list[dict[str, Any]] = [
    document
    for path in sorted(RENDERED)
    if path.parent.name == "kubernetes" and path.suffix == ".yaml" and path.stem != "kustomization"
    for document in yaml.safe_load_all(RENDERED[path])
]


def of_kind(*kinds: str) -> dict[str, dict[str, Any]]:
    """Manifests by name."""
    return {
        manifest["metadata"]["name"]: manifest
        for manifest in MANIFESTS
        if manifest["kind"] in kinds
    }


@pytest.mark.parametrize("path", RENDERED, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_what_is_committed_is_what_is_made(path: Path) -> None:
    assert path.read_text() == RENDERED[path], (
        f"run python deploy/{'render_swarm' if 'swarm' in path.name else 'render_kubernetes'}.py"
    )


def test_the_dashboard_is_what_is_made() -> None:
    assert json.loads(render_dashboard.OUTPUT.read_text()) == render_dashboard.dashboard()


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
    assert set(yaml.safe_load(RENDERED[DEPLOY / "swarm.yaml"])["services"]) == ours | {
        "nats",
        "store",
    }


def test_nothing_secret_is_in_a_rendered_file() -> None:
    assert "MOTET_API_KEY:" not in RENDERED[DEPLOY / "swarm.yaml"]
    assert not [path for path, text in RENDERED.items() if "MOTET_NATS_PASSWORD" in text]
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
    stack = yaml.safe_load(RENDERED[DEPLOY / "swarm.yaml"])
    for name, service in stack["services"].items():
        found = {one["source"] for one in service.get("secrets", ())} - {"motet_api_keys"}
        users = {"nats": ("server",), "store": ()}.get(name, SHARED.get(name, (name,)))
        assert found == {f"motet_nats_{user}" for user in users}
    assert stack["secrets"].keys() == {"motet_api_keys", "motet_nats_server"} | {
        f"motet_nats_{user}" for user in USERS if user != "operator"
    }


def test_the_kustomization_names_every_file() -> None:
    named = yaml.safe_load(RENDERED[DEPLOY / "kubernetes" / "kustomization.yaml"])
    files = {path.name for path in (DEPLOY / "kubernetes").iterdir()} - {
        "kustomization.yaml",
        "autoscaling.yaml",
    }
    assert {*named["resources"], *named["configMapGenerator"][0]["files"]} == files
