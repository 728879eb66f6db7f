"""`motet deploy` with three NATS servers, a hub of leaf nodes, and a leaf: what is rendered is taken and complete."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from motet_cli.deploy.compose import substitute
from motet_cli.deploy.kubernetes import kubernetes_files
from motet_cli.deploy.nats_topology import NatsTopology
from motet_cli.deploy.swarm import STACK_FILE, swarm_files
from motet_cli.joining.certificates import make_authority, make_certificate
from motet_cli.joining.server_links import write_links
from motet_cli.main import main
from motet_shared.credentials import make_passwords
from motet_shared.testing import nats_binary

MEMBERS = [f"nats-{number}.nats-servers" for number in range(3)]
TOPOLOGIES = {
    "single": NatsTopology(),
    "cluster": NatsTopology(servers=3),
    "hub": NatsTopology(leafnodes=True),
    "cluster with leaf nodes": NatsTopology(servers=3, leafnodes=True),
    "leaf": NatsTopology(leaf="site-b"),
}
every = pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a server is given besides its configuration, by file name."""
    made = tmp_path_factory.mktemp("made")
    make_passwords(made)
    write_links(made, MEMBERS, ["hub.example"])
    make_authority(made)
    cert, key = make_certificate(made, ["hub.example"], "host")
    folder = tmp_path_factory.mktemp("secrets")
    for path in (*(made / "server").iterdir(), made / "leaf" / "hub.conf", made / "ca.crt"):
        shutil.copy(path, folder)
    shutil.copy(cert, folder / "tls.crt")
    shutil.copy(key, folder / "tls.key")
    return folder


def check_server(root: Path, files: Mapping[str, str], argv: list[str], env: dict[str, str]) -> str:
    """Lay a container's files below `root`, and let nats-server test its configuration; return that."""
    for target, text in files.items():
        path = root / target.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    given = {k: f"{root}{v}" if v.startswith("/") else v for k, v in env.items()}
    config = f"{root}{argv[argv.index('--config') + 1]}"
    done = subprocess.run(
        [str(nats_binary()), "-t", "-c", config],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Path(config).read_text()


@every
def test_kubernetes_takes_the_manifests_and_nats_server_the_configuration(
    topology: NatsTopology, secrets: Path, tmp_path: Path
) -> None:
    files = kubernetes_files({}, topology)
    manifests = list(yaml.safe_load_all(files["nats.yaml"]))
    for manifest in manifests:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    named = yaml.safe_load(files["kustomization.yaml"])["configMapGenerator"][0]["files"]
    assert set(named) == {name for name in files if name.endswith(".conf")}
    spec = manifests[0]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounted = {one["mountPath"] for one in container["volumeMounts"]}
    assert {one["name"] for one in container["volumeMounts"]} == {
        *volumes,
        *(claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())),
    }
    inside = {f"/etc/nats/{name}": files[name] for name in named}
    for item in volumes["config"]["projected"]["sources"][1]["secret"]["items"]:
        inside[f"/etc/nats/{item['path']}"] = (secrets / item["key"]).read_text()
    if "peer" in volumes:
        for name in ("ca.crt", "tls.crt", "tls.key"):
            inside[f"/etc/nats-peer/{name}"] = (secrets / name).read_text()
    env = {one["name"]: one.get("value", "nats-0") for one in container["env"]}
    text = check_server(tmp_path, inside, container["args"], env)
    assert spec["replicas"] == topology.servers
    assert ("/store" in mounted) == ("volumeClaimTemplates" in spec) == (not topology.leaf)
    services = {one["metadata"]["name"]: one for one in manifests if one["kind"] == "Service"}
    ports = {one["name"] for one in container["ports"]}
    for service in services.values():
        assert {one["targetPort"] for one in service["spec"]["ports"]} <= ports
    if topology.servers == 3:
        # Members find each other by the names in cluster.conf, ready or not.
        assert "cluster {" in text
        service = services[spec["serviceName"]]["spec"]
        assert spec["serviceName"] == MEMBERS[0].partition(".")[2]
        assert service["clusterIP"] == "None"
        assert service["publishNotReadyAddresses"]
        assert spec["podManagementPolicy"] == "Parallel"


@every
def test_swarm_gives_each_server_its_configuration_storage_and_secrets(
    topology: NatsTopology, secrets: Path, tmp_path: Path
) -> None:
    files = swarm_files(topology)
    stack = yaml.safe_load(files[STACK_FILE])
    servers = {
        name: one for name, one in stack["services"].items() if name.partition("-")[0] == "nats"
    }
    assert len(servers) == topology.servers
    assert {config["file"] for config in stack["configs"].values()} == {
        f"./{name}" for name in files if name != STACK_FILE
    }
    used: set[str] = set()
    for name, service in servers.items():
        inside: dict[str, str] = {}
        for one in service["configs"]:
            used.add(one["source"])
            file = stack["configs"][one["source"]]["file"].removeprefix("./")
            inside[one["target"]] = files[file]
        for one in service["secrets"]:
            assert one["source"] in stack["secrets"]
            inside[one["target"]] = (secrets / Path(one["target"]).name).read_text()
        env = {k: substitute(v, {}) for k, v in service["environment"].items()}
        check_server(tmp_path / name, inside, service["command"], env)
        if not topology.leaf:
            store = stack["services"][name.replace("nats", "store")]
            assert store["deploy"]["placement"] == service["deploy"]["placement"]
    assert used == stack["configs"].keys()
    nodes = [str(one["deploy"].get("placement")) for one in servers.values()]
    assert len(set(nodes)) == topology.servers, "each server has a node of its own"
    urls = {
        url
        for one in stack["services"].values()
        if (url := one.get("environment", {}).get("MOTET_NATS_URL"))
    }
    assert urls == {",".join(f"nats://{name}:4222" for name in servers)}


def test_one_server_is_the_one_of_the_compose_file() -> None:
    compose = yaml.safe_load(swarm_files()[STACK_FILE])["services"]["nats"]["command"]
    assert NatsTopology().arguments == compose


def test_the_command_writes_them_and_refuses_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--nats-servers", "3", "--leafnodes")
    for platform, made in (("kubernetes", kubernetes_files), ("swarm", None)):
        folder = tmp_path / platform
        assert main(["deploy", platform, str(folder), *words]) == 0
        topology = NatsTopology(servers=3, leafnodes=True)
        expected: dict[str, Any] = made({}, topology) if made else swarm_files(topology)
        assert {path.name: path.read_text() for path in folder.iterdir()} == expected
    for refused in (("--leaf", "b", "--nats-servers", "3"), ("--leaf", "B c")):
        assert main(["deploy", "swarm", str(tmp_path / "x"), *refused]) == 2
        assert "--leaf" in capsys.readouterr().err
