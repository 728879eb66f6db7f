"""Write swarm.yaml from compose.yaml: `python deploy/render_swarm.py`.

A Swarm knows neither profiles nor `depends_on`, builds nothing, and shares neither folders nor /dev/shm between the
containers of its machines. So: what a profile switches on has no replicas until it is asked for; files of this
repository become configs, passwords and keys secrets; limits and restarts go to `deploy`; bulk data takes TCP.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from manifests import ROOT, composed, dump

HERE = Path(__file__).resolve().parent
HEAD = """\
# Made of compose.yaml by deploy/render_swarm.py: change that, and run this.
#
#   motet credentials passwords credentials           # one per role; a secret each, and all of them for NATS
#   docker secret create motet_nats_server credentials/server/passwords.conf
#   for role in gateway tokenizer decode prefill vision asr vad speakers tts diffusion embedding planner; do
#     docker secret create motet_nats_$role credentials/$role/$role
#   done
#   docker secret create motet_api_keys FILE          # a key per line
#   MOTET_MODELS_DIR=/srv/models docker stack deploy -c deploy/swarm.yaml motet
#
# The images must be in a registry that every node reaches (MOTET_REGISTRY=registry.example/), the models at the same
# path on every node. MOTET_<SERVICE>_REPLICAS sets how many there are of each; docker service scale changes it.
"""
SHM_BYTES = 512 << 20
CREDENTIALS, KEYS = "motet_nats_", "motet_api_keys"  # the first: and a role
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
# What is rendered otherwise than by rule: data that must not be written by two at a time, and work that ends.
_STOP_FIRST = ("nats",)
_ONCE = ("store",)
_SECRETS = ("credentials",)  # what it makes are secrets here
_ENGINES = ("decode", "prefill")  # either may become the other, see `motet role`

_LEFT_OUT = {
    "gpu",
    "gpu-images",
    "gpu-embedding",
    "observability",
}  # every Swarm has its own ways to these

Service = dict[str, Any]


def render(compose: dict[str, Any]) -> dict[str, Any]:
    """The stack file of a compose file, both as YAML holds them."""
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
    if "ipc" in compose and name != "nats":  # blobs lie there, though nobody shares it
        folders.append({"type": "tmpfs", "target": "/dev/shm", "tmpfs": {"size": SHM_BYTES}})
    service["volumes"] = [*service.get("volumes", []), *folders]
    _hide(name, service)
    if (
        "healthcheck" in service
    ):  # what is not healthy is killed, and nobody is ready before the others are
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
    if (
        "ports" not in compose
    ):  # names lead to the tasks themselves: nothing stands between a service and NATS
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
    """Files of this repository become configs; folders of it, and of the operator, stay where they are on each node."""
    stay, moved = [], []
    for volume in service.get("volumes", []):
        if volume.startswith("nats-"):  # see _hide
            continue
        source, target = (
            volume.rsplit(":", 2)[:2] if volume.endswith(":ro") else volume.rsplit(":", 1)
        )
        if source.startswith("./") and (ROOT / source).is_file():
            config = "motet_" + Path(source).name.replace(".", "_").replace("-", "_")
            configs[config] = {"file": f"../{source[2:]}"}
            moved.append({"source": config, "target": target})
        else:
            stay.append(_on_nodes(volume))
    service.pop("volumes", None)
    if stay:
        service["volumes"] = stay
    if moved:
        service["configs"] = moved


def _on_nodes(volume: str) -> str:
    """The folder of the models is not beside the compose file, but where every node has it."""
    return re.sub(
        r"^(\$\{MOTET_MODELS_DIR:-\./models\}|\./models)",
        "${MOTET_MODELS_DIR:-/srv/models}",
        volume,
    )


def _hide(name: str, service: Service) -> None:
    """Passwords and keys come as files."""
    environment = service.get("environment", {})
    if name == "nats":
        service["secrets"] = [_secret("server", "/etc/nats/server/passwords.conf")]
    elif folder := environment.get("MOTET_NATS_CREDENTIALS"):
        users = _ENGINES if name in _ENGINES else (name,)
        service["secrets"] = [_secret(user, f"{folder}/{user}") for user in users]
    if environment.pop("MOTET_API_KEY", None) is not None:
        service["secrets"].append({"source": KEYS})
        environment["MOTET_API_KEY_FILE"] = f"/run/secrets/{KEYS}"
        environment.pop(
            "MOTET_INSECURE", None
        )  # everybody reaches a Swarm's ports: a key is needed


def _secret(user: str, target: str) -> Service:
    """A file that only the user of the services may read."""
    return {
        "source": CREDENTIALS + user,
        "target": target,
        "uid": "${MOTET_USER:-10001}",
        "mode": 0o400,
    }


def _port(port: str) -> Service:
    """Without an address: a Swarm publishes on every node, or (`host`) where a task runs."""
    target = port.rpartition(":")[2]
    return {
        "target": int(target),
        "published": "${MOTET_PORT:-8000}",
        "mode": "${MOTET_PUBLISH_MODE:-ingress}",
    }


def written() -> dict[Path, str]:
    """What the files hold."""
    return {HERE / "swarm.yaml": HEAD + dump(render(composed()))}


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text)
