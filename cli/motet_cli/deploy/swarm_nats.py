"""Give a stack file for Docker Swarm the NATS servers of a topology, instead of the one of compose.yaml."""

from __future__ import annotations

import copy
from typing import Any

from motet_cli.deploy.compose import Document
from motet_cli.deploy.nats_topology import FOLDER, PEER, PEER_FILES, NatsTopology

SECRETS = "motet_nats_"
_CLIENTS = "nats://nats:4222"


def place_servers(stack: Document, topology: NatsTopology) -> None:
    """Replace the services `nats` and `store`, and tell all others the servers' addresses."""
    services = stack["services"]
    nats, store = services.pop("nats"), services.pop("store")
    names = ["nats"]
    if topology.servers > 1:
        names = [f"nats-{number}" for number in range(1, topology.servers + 1)]
    made: dict[str, Any] = {}
    for number, name in enumerate(names, 1):
        label = str(number) if topology.servers > 1 else "true"
        made[name] = _server(copy.deepcopy(nats), name, label, topology)
        if not topology.leaf:
            made[name.replace("nats", "store")] = _placed(copy.deepcopy(store), label)
    url = ",".join(f"nats://{name}:4222" for name in names)
    for service in services.values():
        environment = service.get("environment", {})
        if environment.get("MOTET_NATS_URL") == _CLIENTS:
            environment["MOTET_NATS_URL"] = url
    stack["services"] = made | services
    stack["configs"] |= {_config(name): {"file": f"./{name}"} for name in topology.configs()}
    used = {one["source"] for service in made.values() for one in service.get("configs", ())}
    for name in {_config("nats-store.conf")} - used:
        del stack["configs"][name]
    stack["secrets"] |= {name: {"external": True} for name in _secret_files(topology)}
    if topology.leaf:
        del stack["volumes"]["store"]


def _server(service: Document, name: str, label: str, topology: NatsTopology) -> Document:
    service["command"] = topology.arguments
    size = {} if topology.leaf else service["environment"]
    service["environment"] = size | topology.environment()
    if topology.servers > 1:
        service["environment"]["MOTET_NATS_NAME"] = name
    service["configs"] = [
        {"source": _config(file), "target": f"{FOLDER}/{file}"} for file in topology.configs()
    ]
    (password,) = service["secrets"]
    service["secrets"] = [
        password | {"source": source, "target": target}
        for source, target in _secret_files(topology).items()
    ]
    if topology.leaf:
        service["volumes"] = [one for one in service["volumes"] if one != "store:/store"]
        del service["deploy"]["placement"]
        return service
    if topology.leafnodes:
        port = topology.ports["leafnodes"]
        service["ports"] = [{"target": port, "published": port, "mode": "host"}]
    return _placed(service, label)


def _placed(service: Document, label: str) -> Document:
    """Bind a service to the node whose label `motet.store` has this value."""
    service["deploy"]["placement"] = {"constraints": [f"node.labels.motet.store == {label}"]}
    return service


def _secret_files(topology: NatsTopology) -> dict[str, str]:
    """Return where each secret of a server is mounted, by its name."""
    found = {SECRETS + "server": f"{FOLDER}/server/passwords.conf"}
    for file in topology.secrets[1:]:
        found[SECRETS + file.removesuffix(".conf")] = f"{FOLDER}/server/{file}"
    if topology.needs_certificate:
        for file in PEER_FILES.values():
            found[SECRETS + "peer_" + file.replace(".", "_")] = f"{PEER}/{file}"
    return found


def _config(name: str) -> str:
    return "motet_" + name.replace(".", "_").replace("-", "_")
