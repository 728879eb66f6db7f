"""Write a stack file for Docker Swarm.

A Swarm knows neither profiles nor `depends_on`, builds nothing, and shares neither folders nor
/dev/shm between the containers of its machines. So services of a profile have no replicas until
they are scaled; files of this repository become configs, passwords and keys secrets; limits and
restarts go to `deploy`; bulk data takes TCP.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from motet_cli.deploy.compose import composed, dump
from motet_cli.supervision import nats
from motet_shared import __version__
from motet_shared.credentials import USERS

STACK_FILE = "swarm.yaml"
SHM_BYTES = 512 << 20
CREDENTIALS, KEYS = "motet_nats_", "motet_api_keys"  # the first: and a role
HEAD = f"""\
# Made by `motet deploy swarm`, motet {__version__}.
#
#   motet credentials passwords credentials           # one per role; a secret each, and all of them for NATS
#   docker secret create motet_nats_server credentials/server/passwords.conf
#   for role in {" ".join(user for user in USERS if user != "operator")}; do
#     docker secret create motet_nats_$role credentials/$role/$role
#   done
#   docker secret create motet_api_keys FILE          # a key per line
#   MOTET_MODELS_DIR=/srv/models docker stack deploy -c {STACK_FILE} motet
#
# The images must be in a registry that every node reaches (MOTET_REGISTRY=registry.example/), the models at the same
# path on every node. MOTET_<SERVICE>_REPLICAS sets how many there are of each; docker service scale changes it.
"""
_DROPPED = (
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
# Exceptions: data that must not be written by two at a time, work that ends, secrets.
_STOP_FIRST = ("nats",)
_ONCE = ("store",)
_SECRETS = ("credentials",)  # what it creates are secrets here
_ENGINES = ("decode", "prefill")  # either may become the other, see `motet role`

_LEFT_OUT = {
    "gpu",
    "gpu-images",
    "gpu-embedding",
    "observability",
}  # each Swarm provides these in its own way

Service = dict[str, Any]


def swarm_files() -> dict[str, str]:
    """Return the text of each file by name: the stack file, and the files of its configs."""
    stack, configs = composed(), {}
    files = {path.name: path.read_text() for path in nats.find_configs()}
    rendered = render(stack)
    for config in rendered["configs"].values():
        name = Path(config["file"]).name
        configs[name] = files[name]
    return {STACK_FILE: HEAD + dump(rendered)} | configs


def render(compose: dict[str, Any]) -> dict[str, Any]:
    """Return the stack file of a compose file, both as YAML holds them."""
    configs: dict[str, Any] = {}
    services = {
        name: _service(name, one, configs)
        for name, one in compose["services"].items()
        if not set(one.get("profiles", ())) & _LEFT_OUT and name not in _SECRETS
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
    service = {key: value for key, value in compose.items() if key not in _DROPPED}
    service["image"] = re.sub(r"^(motet-)", r"${MOTET_REGISTRY:-}\1", service["image"])
    service["deploy"] = _deploy(name, compose)
    _move_files(service, configs)
    folders: list[Service] = [
        {"type": "tmpfs", "target": folder} for folder in service.pop("tmpfs", [])
    ]
    if "ipc" in compose and name != "nats":  # of blobs, which no other container shares
        folders.append({"type": "tmpfs", "target": "/dev/shm", "tmpfs": {"size": SHM_BYTES}})
    service["volumes"] = [*service.get("volumes", []), *folders]
    _hide(name, service)
    if "healthcheck" in service:  # a Swarm kills what is not healthy: live is enough
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
    if "ports" not in compose:  # names lead to the tasks themselves, without a proxy
        found["endpoint_mode"] = "dnsrr"
    if name in _ONCE:
        found["restart_policy"] = {"condition": "on-failure", "delay": "1s", "max_attempts": 10}
    elif name in _STOP_FIRST:
        found["update_config"] = _UPDATE | {"order": "stop-first"}
    else:
        found["replicas"] = f"${{MOTET_{name.upper().replace('-', '_')}_REPLICAS:-{default}}}"
        found["update_config"] = dict(_UPDATE)
    if name in (*_ONCE, *_STOP_FIRST):  # their volume is on one machine
        found["placement"] = {"constraints": ["node.labels.motet.store == true"]}
    if "mem_limit" in compose:
        found["resources"] = {"limits": {"memory": compose["mem_limit"]}}
    return found


def _move_files(service: Service, configs: dict[str, Any]) -> None:
    """Make configs of files of this repository; folders stay where they are on each node."""
    stay, moved = [], []
    for volume in service.get("volumes", []):
        if volume.startswith("nats-"):  # see _hide
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
    """Return a volume with the folder of models where every node has it."""
    return re.sub(
        r"^(\$\{MOTET_MODELS_DIR:-\./models\}|\./models)",
        "${MOTET_MODELS_DIR:-/srv/models}",
        volume,
    )


def _hide(name: str, service: Service) -> None:
    """Give a service its passwords and keys as files."""
    environment = service.get("environment", {})
    if name == "nats":
        service["secrets"] = [_secret("server", "/etc/nats/server/passwords.conf")]
    elif folder := environment.get("MOTET_NATS_CREDENTIALS"):
        users = _ENGINES if name in _ENGINES else (name,)
        service["secrets"] = [_secret(user, f"{folder}/{user}") for user in users]
    if environment.pop("MOTET_API_KEY", None) is not None:
        service["secrets"].append({"source": KEYS})
        environment["MOTET_API_KEY_FILE"] = f"/run/secrets/{KEYS}"
        # Any machine reaches the ports of a Swarm: a key is needed.
        environment.pop("MOTET_INSECURE", None)


def _secret(user: str, target: str) -> Service:
    """Return a secret as a file that only the user of the services may read."""
    return {
        "source": CREDENTIALS + user,
        "target": target,
        "uid": "${MOTET_USER:-10001}",
        "mode": 0o400,
    }


def _port(port: str) -> Service:
    """Return a port without an address: published on every node, or (`host`) where a task runs."""
    target = port.rpartition(":")[2]
    return {
        "target": int(target),
        "published": "${MOTET_PORT:-8000}",
        "mode": "${MOTET_PUBLISH_MODE:-ingress}",
    }
