"""Write a stack file for Docker Swarm.

Swarm has neither profiles nor `depends_on`, does not build images, and shares neither folders nor
/dev/shm between nodes. So services of a profile start with no replicas, files of this repository
become configs, passwords and keys become secrets, limits and restart policies move to `deploy`, and
bulk data uses TCP.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from motet_cli.deploy.compose import dump, load_compose
from motet_cli.deploy.nats_topology import NatsTopology
from motet_cli.deploy.swarm_nats import place_servers
from motet_cli.supervision import nats
from motet_shared import __version__
from motet_shared.credentials import USERS

STACK_FILE = "swarm.yaml"
SHM_BYTES = 512 << 20
CREDENTIALS, KEYS = "motet_nats_", "motet_api_keys"  # credentials: followed by a role
HEAD = f"""\
# Made by `motet deploy swarm`, motet {__version__}.
#
#   motet credentials passwords credentials           # one per role, and the server's file with all of them
#   docker secret create motet_nats_server credentials/server/passwords.conf
#   for role in {" ".join(user for user in USERS if user != "operator")}; do
#     docker secret create motet_nats_$role credentials/$role/$role
#   done
#   docker secret create motet_api_keys FILE          # one key per line
#   MOTET_MODELS_DIR=/srv/models docker stack deploy -c {STACK_FILE} motet
#
# The images must be in a registry that every node reaches (MOTET_REGISTRY=registry.example/), the models at the same
# path on every node. MOTET_<SERVICE>_REPLICAS sets the replicas of a service; docker service scale changes them.
"""
_UNSUPPORTED = (
    "build",
    "depends_on",
    "restart",
    "profiles",
    "ipc",
    "shm_size",
    "security_opt",
    "mem_limit",
    "pids_limit",
    "scale",
)
_UPDATE = {"order": "start-first", "failure_action": "rollback", "delay": "5s"}
# Exceptions: data that two tasks must not write at once, jobs that end, services replaced by secrets.
_STOP_FIRST = ("nats",)
_RUN_TO_COMPLETION = ("store",)
_REPLACED_BY_SECRETS = ("credentials",)  # Swarm secrets replace the files that it writes
_ENGINES = ("decode", "prefill")  # they may switch roles, see `motet role`

_EXCLUDED_PROFILES = {
    "gpu",
    "gpu-images",
    "gpu-embedding",
    "gpu-ranking",
    "observability",
}  # every Swarm has its own GPU scheduling and monitoring

Service = dict[str, Any]


def swarm_files(topology: NatsTopology | None = None) -> dict[str, str]:
    """Return the text of each file by name: the stack file, and the files of its configs.

    topology: NATS servers, by default one.
    """
    topology = topology or NatsTopology()
    rendered = render(load_compose())
    if not topology.is_single:
        place_servers(rendered, topology)
    files = {path.name: path.read_text() for path in nats.find_configs()} | topology.configs()
    names = (Path(config["file"]).name for config in rendered["configs"].values())
    return {STACK_FILE: HEAD + dump(rendered)} | {name: files[name] for name in names}


def render(compose: dict[str, Any]) -> dict[str, Any]:
    """Return the stack file of a compose file, both as parsed YAML."""
    configs: dict[str, Any] = {}
    services = {
        name: _service(name, one, configs)
        for name, one in compose["services"].items()
        if not set(one.get("profiles", ())) & _EXCLUDED_PROFILES
        and name not in _REPLACED_BY_SECRETS
    }
    named = {
        secret["source"] for service in services.values() for secret in service.get("secrets", ())
    }
    secrets = {name: {"external": True} for name in sorted(named)}
    return {
        "version": "3.8",
        "services": services,
        "configs": configs,
        "secrets": secrets,
        "volumes": {
            name: one for name, one in compose["volumes"].items() if not name.startswith("nats-")
        },
        "networks": {"default": {"driver": "overlay"}},
    }


def _service(name: str, compose: Service, configs: dict[str, Any]) -> Service:
    service = {key: value for key, value in compose.items() if key not in _UNSUPPORTED}
    service["image"] = re.sub(r"^(motet-)", r"${MOTET_REGISTRY:-}\1", service["image"])
    service["deploy"] = _deploy(name, compose)
    _move_files(service, configs)
    folders: list[Service] = [
        {"type": "tmpfs", "target": folder} for folder in service.pop("tmpfs", [])
    ]
    if "ipc" in compose and name != "nats":  # for blobs, though no other container shares it
        folders.append({"type": "tmpfs", "target": "/dev/shm", "tmpfs": {"size": SHM_BYTES}})
    service["volumes"] = [*service.get("volumes", []), *folders]
    _use_secrets(name, service)
    # Swarm kills unhealthy tasks, and no task is ready before the services that it depends on.
    if "healthcheck" in service:
        test = service["healthcheck"]["test"]
        service["healthcheck"] |= {
            "test": [part.replace("/health/ready", "/health/live") for part in test]
        }
    if "ports" in service:
        service["ports"] = [_port(port) for port in service["ports"]]
    return service


def _deploy(name: str, compose: Service) -> Service:
    default = compose.get("scale", 0 if "profiles" in compose else 1)
    found: Service = {"replicas": 1, "restart_policy": {"condition": "any", "delay": "1s"}}
    # Without published ports, names resolve to the tasks: no proxy between a service and NATS.
    if "ports" not in compose:
        found["endpoint_mode"] = "dnsrr"
    if name in _RUN_TO_COMPLETION:
        found["restart_policy"] = {"condition": "on-failure", "delay": "1s", "max_attempts": 10}
    elif name in _STOP_FIRST:
        found["update_config"] = _UPDATE | {"order": "stop-first"}
    else:
        found["replicas"] = f"${{MOTET_{name.upper().replace('-', '_')}_REPLICAS:-{default}}}"
        found["update_config"] = dict(_UPDATE)
    if name in (*_RUN_TO_COMPLETION, *_STOP_FIRST):  # their volume is on one node
        found["placement"] = {"constraints": ["node.labels.motet.store == true"]}
    if "mem_limit" in compose:
        found["resources"] = {"limits": {"memory": compose["mem_limit"]}}
    return found


def _move_files(service: Service, configs: dict[str, Any]) -> None:
    """Turn files of this repository into configs; folders remain bind mounts on each node."""
    stay, moved = [], []
    for volume in service.get("volumes", []):
        if volume.startswith("nats-"):  # see _use_secrets
            continue
        source, target = (
            volume.rsplit(":", 2)[:2] if volume.endswith(":ro") else volume.rsplit(":", 1)
        )
        if source.startswith("./services/"):
            name = Path(source).name
            config = "motet_" + name.replace(".", "_").replace("-", "_")
            configs[config] = {"file": f"./{name}"}
            moved.append({"source": config, "target": target})
        else:
            stay.append(_on_nodes(volume))
    service.pop("volumes", None)
    if stay:
        service["volumes"] = stay
    if moved:
        service["configs"] = moved


def _on_nodes(volume: str) -> str:
    """Replace the models folder by its path on every node."""
    return re.sub(
        r"^(\$\{MOTET_MODELS_DIR:-\./models\}|\./models)",
        "${MOTET_MODELS_DIR:-/srv/models}",
        volume,
    )


def _use_secrets(name: str, service: Service) -> None:
    """Mount passwords and keys as secrets."""
    environment = service.get("environment", {})
    if name == "nats":
        service["secrets"] = [_secret("server", "/etc/nats/server/passwords.conf")]
    elif folder := environment.get("MOTET_NATS_CREDENTIALS"):
        users = _ENGINES if name in _ENGINES else (name,)
        service["secrets"] = [_secret(user, f"{folder}/{user}") for user in users]
    if environment.pop("MOTET_API_KEY", None) is not None:
        service["secrets"].append({"source": KEYS})
        environment["MOTET_API_KEY_FILE"] = f"/run/secrets/{KEYS}"
        environment.pop("MOTET_INSECURE", None)  # a Swarm's ports are public: a key is required


def _secret(user: str, target: str) -> Service:
    """Return a secret that only the services' user may read."""
    return {
        "source": CREDENTIALS + user,
        "target": target,
        "uid": "${MOTET_USER:-10001}",
        "mode": 0o400,
    }


def _port(port: str) -> Service:
    """Return a published port; a Swarm publishes on every node, or (`host`) where a task runs."""
    target = port.rpartition(":")[2]
    return {
        "target": int(target),
        "published": "${MOTET_PORT:-8000}",
        "mode": "${MOTET_PUBLISH_MODE:-ingress}",
    }
