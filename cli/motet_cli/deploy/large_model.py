"""Write manifests for a model that needs several hosts: vLLM computes it, Motet's stack serves it.

A LeaderWorkerSet starts one pod of vLLM per host, which form one engine by vLLM's own means
(tensor parallel within a host, pipeline parallel between hosts); its leader has the HTTP server. A
Deployment of `motet_engines` makes that server a decode worker. No kustomization names the file: it
needs the LeaderWorkerSet controller and nodes with GPUs. It was rendered and validated, not run.
"""

from __future__ import annotations

from collections.abc import Mapping

from motet_cli.deploy.compose import Document, substitute
from motet_cli.deploy.pods import (
    CREDENTIALS,
    container_security,
    labels,
    models_volume,
    pod_security,
)

HOSTS, GPUS = 2, 8  # pods of one engine, and GPUs of each
IMAGE = "vllm/vllm-openai:v0.32.0"
HTTP, RENDEZVOUS, METRICS = 8000, 29501, 9100
NAME = "vllm"


def large_model(decode: Document, given: Mapping[str, str]) -> list[Document]:
    """Return the manifests. decode: that service of the compose file. given: its variables."""
    model = substitute(decode["environment"]["MOTET_MODEL"], given)
    return [_group(model), _service(), _host(decode, model, given)]


def vllm_arguments(model: str, rank: str, address: str) -> list[str]:
    """Return the arguments of vLLM's server on a host; rank: "0" has the HTTP server."""
    argv = [
        model,
        f"--served-model-name={model.rpartition('/')[2]}",
        f"--tensor-parallel-size={GPUS}",
        f"--pipeline-parallel-size={HOSTS}",
        "--distributed-executor-backend=mp",
        f"--nnodes={HOSTS}",
        f"--node-rank={rank}",
        f"--master-addr={address}",
        f"--master-port={RENDEZVOUS}",
    ]
    return [*argv, f"--port={HTTP}"] if rank == "0" else [*argv, "--headless"]


def _group(model: str) -> Document:
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": NAME, "labels": labels(NAME)},
        "spec": {
            "replicas": 1,
            "leaderWorkerTemplate": {
                "size": HOSTS,
                # A host that is lost ends the engine on all: they start again together.
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": _pod(model, "0", f"{NAME}-leader"),
                "workerTemplate": _pod(model, "$(LWS_WORKER_INDEX)", f"{NAME}-worker"),
            },
        },
    }


def _pod(model: str, rank: str, name: str) -> Document:
    container: Document = {
        "name": NAME,
        "image": IMAGE,
        "args": vllm_arguments(model, rank, "$(LWS_LEADER_ADDRESS)"),
        "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}, {"name": "HOME", "value": "/tmp"}],
        "resources": {"limits": {"nvidia.com/gpu": str(GPUS)}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "models", "mountPath": "/models", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    if rank == "0":
        container["ports"] = [{"name": "http", "containerPort": HTTP}]
        container["readinessProbe"] = {"httpGet": {"path": "/health", "port": "http"}}
    spec = {
        "automountServiceAccountToken": False,
        "securityContext": pod_security(),
        "containers": [container],
        "volumes": [
            models_volume(),
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    return {"metadata": {"labels": labels(name)}, "spec": spec}


def _service() -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME, "labels": labels(NAME)},
        "spec": {
            "selector": labels(f"{NAME}-leader"),
            "ports": [{"name": "http", "port": HTTP, "targetPort": "http"}],
        },
    }


def _host(decode: Document, model: str, given: Mapping[str, str]) -> Document:
    """Return the Deployment that makes vLLM's server a decode worker of the stack."""
    name, own = "decode-vllm", decode["environment"]
    env = {
        "MOTET_NATS_URL": own["MOTET_NATS_URL"],
        "MOTET_NATS_CREDENTIALS": own["MOTET_NATS_CREDENTIALS"],
        "MOTET_METRICS_PORT": str(METRICS),
        "MOTET_METRICS_HOST": "0.0.0.0",
        "MOTET_ENGINE": "openai",
        "MOTET_ENGINE_DIALECT": "vllm",
        "MOTET_ENGINE_URL": f"http://{NAME}:{HTTP}/v1",
        "MOTET_MODEL": model,
    }
    container = {
        "name": name,
        "image": substitute("motet-engines:${MOTET_TAG:-latest}", given),
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "ports": [{"name": "metrics", "containerPort": METRICS}],
        "readinessProbe": {"httpGet": {"path": "/metrics", "port": "metrics"}},
        "resources": {"limits": {"memory": "2Gi"}},
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": "models", "mountPath": "/models", "readOnly": True},
            {"name": "nats", "mountPath": env["MOTET_NATS_CREDENTIALS"], "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    secret = {"secretName": f"{CREDENTIALS}decode", "defaultMode": 0o440}
    spec = {
        "automountServiceAccountToken": False,
        "securityContext": pod_security(),
        "containers": [container],
        "volumes": [
            models_volume(),
            {"name": "nats", "secret": secret},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels(name)},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels(name)},
            "template": {"metadata": {"labels": labels(name)}, "spec": spec},
        },
    }
