"""Write kubernetes/*.yaml and kubernetes/nats.conf from compose.yaml: `python deploy/render_kubernetes.py`.

Each service becomes a Deployment with probes, limits, a drain before it stops, and a PodDisruptionBudget; NATS a
StatefulSet with its own storage. What is scaled by load has a ScaledObject of KEDA in `autoscaling.yaml`, apart, as it
needs KEDA and Prometheus in the cluster. `kubectl apply -k deploy/kubernetes` applies all of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from manifests import ROOT, Document, composed, dump

HERE = Path(__file__).resolve().parent
OUTPUT = HERE / "kubernetes"
HEAD = "# Made of compose.yaml by deploy/render_kubernetes.py: change that, and run this.\n"
CREDENTIALS, KEYS, MODELS = "motet-nats-", "motet-api-keys", "motet-models"  # the first: and a role
USER = 10001
DRAIN_SECONDS = 5  # until nobody sends a pod that ends new connections
METRICS = 9100
HTTP = 8000
SERVICE_HOSTS = ("*.svc", "*.svc.cluster.local")  # of the gateway's Service, in whatever namespace


class Load(NamedTuple):
    """What a service is scaled by: `query` for Prometheus, and how much of it one replica is to bear."""

    query: str
    each: int
    most: int


# Work that waits or runs, as every instance tells it; the tokenizer and the gateway are bound by what is open.
AUTOSCALED = {
    "gateway": Load("sum(motet_active_streams) + sum(motet_active_sockets)", 500, 8),
    "tokenizer": Load('sum(motet_active{role="tokenizer"})', 200, 8),
    "decode": Load('sum(motet_waiting{role="decode"}) + sum(motet_running{role="decode"})', 32, 16),
    "asr": Load('sum(motet_active{role="asr"})', 8, 8),
    "tts": Load('sum(motet_active{role="tts"})', 8, 8),
}


class Workload:
    """One service of the compose file as manifests."""

    def __init__(self, name: str, compose: Document):
        self.name, self._compose = name, compose
        self.labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "motet"}

    def documents(self) -> list[Document]:
        """Deployment and PodDisruptionBudget, and a Service for what is asked from outside."""
        found = [self._deployment(), self._budget()]
        return [*found, self._service()] if "ports" in self._compose else found

    def _meta(self, suffix: str = "") -> Document:
        return {"name": self.name + suffix, "labels": self.labels}

    def _deployment(self) -> Document:
        spec: Document = {
            "replicas": replicas(self._compose),
            "selector": {"matchLabels": self.labels},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
            },
            "template": self._pod(),
        }
        if self.name in AUTOSCALED:  # else every `apply` would undo what KEDA has done
            del spec["replicas"]
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": self._meta(),
            "spec": spec,
        }

    def _pod(self) -> Document:
        annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(METRICS)}
        grace = int(self._compose.get("stop_grace_period", "10s").removesuffix("s")) + DRAIN_SECONDS
        spec = {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": grace,
            "securityContext": pod_security(),
            "containers": [self._container()],
            "volumes": [
                {"name": "tmp", "emptyDir": {}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "512Mi"}},
                {
                    "name": "nats",
                    "secret": {"secretName": CREDENTIALS + self.name, "defaultMode": 0o440},
                },
                *([models_volume()] if self._has_models else []),
            ],
        }
        return {"metadata": {"labels": self.labels, "annotations": annotations}, "spec": spec}

    def _container(self) -> Document:
        mounts: list[Document] = [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            {
                "name": "nats",
                "mountPath": self._compose["environment"]["MOTET_NATS_CREDENTIALS"],
                "readOnly": True,
            },
        ]
        if self._has_models:
            mounts += [self._mount(volume) for volume in self._folders]
        return {
            "name": self.name,
            "image": plain(self._compose["image"]),
            "env": self._env(),
            "ports": [{"name": name, "containerPort": port} for name, port in self._ports.items()],
            "securityContext": container_security(),
            "resources": {"limits": {"memory": memory(self._compose["mem_limit"])}},
            **self._probes(),
            "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(DRAIN_SECONDS)]}}},
            "volumeMounts": mounts,
        }

    def _env(self) -> list[Document]:
        """Settings of the compose file; who gets in is decided by keys, whoever reaches the port."""
        left_out = ("MOTET_API_KEY", "MOTET_INSECURE")
        settings = {
            k: plain(str(v)) for k, v in self._compose["environment"].items() if k not in left_out
        }
        if hosts := settings.get("MOTET_ALLOWED_HOSTS"):
            settings["MOTET_ALLOWED_HOSTS"] = ",".join((hosts, *SERVICE_HOSTS))
        env: list[Document] = [
            {"name": key, "value": value} for key, value in settings.items() if value
        ]
        if "MOTET_API_KEY" in self._compose["environment"]:
            env.append(secret_env("MOTET_API_KEY", KEYS, "keys"))
        return env

    def _probes(self) -> Document:
        """A pod gets work when it is ready, and is replaced when it no longer answers."""
        ready, live = (
            ("/health/ready", "/health/live") if "http" in self._ports else ("/metrics", "/metrics")
        )
        port = next(iter(self._ports))
        return {
            "startupProbe": {
                "httpGet": {"path": live, "port": port},
                "periodSeconds": 2,
                "failureThreshold": 150,
            },
            "readinessProbe": {
                "httpGet": {"path": ready, "port": port},
                "periodSeconds": 5,
                "timeoutSeconds": 5,
            },
            "livenessProbe": {
                "httpGet": {"path": live, "port": port},
                "periodSeconds": 10,
                "timeoutSeconds": 5,
                "failureThreshold": 6,
            },
        }

    def _mount(self, volume: str) -> Document:
        """Of the models; a folder of one of them is a folder of the volume with all."""
        source, target = plain(volume).removesuffix(":ro").rsplit(":", 1)
        below = source.removeprefix("./models").strip("/")
        return {"name": "models", "mountPath": target, "readOnly": True} | (
            {"subPath": below} if below else {}
        )

    def _budget(self) -> Document:
        spec = {"maxUnavailable": 1, "selector": {"matchLabels": self.labels}}
        return {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": self._meta(),
            "spec": spec,
        }

    def _service(self) -> Document:
        ports = [{"name": "http", "port": 80, "targetPort": "http"}]
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._meta(),
            "spec": {"selector": self.labels, "ports": ports},
        }

    @property
    def _ports(self) -> dict[str, int]:
        """By name; the one that probes ask first."""
        return ({"http": HTTP} if "ports" in self._compose else {}) | {"metrics": METRICS}

    @property
    def _has_models(self) -> bool:
        return bool(self._folders)

    @property
    def _folders(self) -> list[str]:
        """Volumes of the compose file but that of the password, which is a Secret here."""
        return [
            volume for volume in self._compose.get("volumes", []) if not volume.startswith("nats-")
        ]


# ---------------------------------------------------------------------------------------------------------------- parts
def plain(text: str) -> str:
    """A text of the compose file with its defaults for what the environment does not say."""
    while (replaced := re.sub(r"\$\{\w+:-([^${}]*)\}", r"\1", text)) != text:
        text = replaced
    return text


def replicas(compose: Document) -> int:
    """How many there are of a service until somebody asks for more."""
    return int(compose.get("scale", 0 if "profiles" in compose else 1))


def memory(limit: str) -> str:
    """In Kubernetes' units: 8g is 8Gi."""
    return re.sub(r"([gm])$", lambda unit: unit.group().upper() + "i", plain(limit))


def secret_env(name: str, secret: str, key: str) -> Document:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def models_volume() -> Document:
    return {"name": "models", "persistentVolumeClaim": {"claimName": MODELS, "readOnly": True}}


def pod_security() -> Document:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Document:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def nats(compose: Document) -> list[Document]:
    """The server as a StatefulSet of one, its Service, and its budget. docs/scale.md tells of more than one."""
    labels = {"app.kubernetes.io/name": "nats", "app.kubernetes.io/part-of": "motet"}
    container = {
        "name": "nats",
        "image": plain(compose["image"]),
        "args": compose["command"],
        "env": [
            {
                "name": "MOTET_STORE_SIZE",
                "value": plain(compose["environment"]["MOTET_STORE_SIZE"]),
            },
        ],
        "ports": [{"name": "client", "containerPort": 4222}],
        "readinessProbe": {"tcpSocket": {"port": "client"}, "periodSeconds": 5},
        "livenessProbe": {
            "tcpSocket": {"port": "client"},
            "periodSeconds": 10,
            "failureThreshold": 6,
        },
        "securityContext": container_security(),
        "resources": {"limits": {"memory": memory(compose["mem_limit"])}},
        "volumeMounts": [
            {"name": "store", "mountPath": "/store"},
            {"name": "config", "mountPath": "/etc/nats"},
        ],
    }
    settings = {"configMap": {"name": "motet-nats"}}
    items = [{"key": "passwords.conf", "path": "server/passwords.conf"}]  # nats.conf includes it
    passwords = {"secret": {"name": CREDENTIALS + "server", "items": items}}
    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 30,
        "securityContext": pod_security(),
        "containers": [container],
        "volumes": [
            {
                "name": "config",
                "projected": {"defaultMode": 0o440, "sources": [settings, passwords]},
            }
        ],
    }
    claim = {
        "metadata": {"name": "store"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "4Gi"}}},
    }
    spec = {
        "serviceName": "nats",
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
        "volumeClaimTemplates": [claim],
    }
    meta = {"name": "nats", "labels": labels}
    ports = [{"name": "client", "port": 4222, "targetPort": "client"}]
    return [
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta, "spec": spec},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            "spec": {"selector": labels, "ports": ports},
        },
    ]


def scaled_object(name: str, load: Load) -> Document:
    """Of KEDA. New pods at once; one is taken away after five quiet minutes, and never the last."""
    trigger = {
        "type": "prometheus",
        "metadata": {
            "serverAddress": "http://prometheus.monitoring:9090",
            "query": load.query,
            "threshold": str(load.each),
        },
    }
    down = {
        "stabilizationWindowSeconds": 300,
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
    }
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": name},
        "spec": {
            "scaleTargetRef": {"name": name},
            "minReplicaCount": 1,
            "maxReplicaCount": load.most,
            "pollingInterval": 5,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": down}}},
            "triggers": [trigger],
        },
    }


# -------------------------------------------------------------------------------------------------------------- writing
def written() -> dict[Path, str]:
    """What the files hold."""
    services = composed()["services"]
    files = {"nats": nats(services["nats"])}
    for name, compose in services.items():
        if (
            plain(compose["image"]).startswith("motet-")
            and name not in ("store", "credentials")
            and not name.endswith("-gpu")
        ):
            files[name] = Workload(name, compose).documents()
    files["autoscaling"] = [scaled_object(name, load) for name, load in AUTOSCALED.items()]
    found = {OUTPUT / f"{name}.yaml": HEAD + dump(*documents) for name, documents in files.items()}
    found[OUTPUT / "kustomization.yaml"] = HEAD + dump(kustomization(list(files)))
    for conf in ("nats.conf", "nats-store.conf"):
        found[OUTPUT / conf] = (ROOT / "services" / conf).read_text()
    return found


def kustomization(files: list[str]) -> Document:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "motet",
        "resources": [f"{name}.yaml" for name in files if name != "autoscaling"],
        "configMapGenerator": [{"name": "motet-nats", "files": ["nats.conf", "nats-store.conf"]}],
    }


if __name__ == "__main__":
    OUTPUT.mkdir(exist_ok=True)
    for path, text in written().items():
        path.write_text(text)
