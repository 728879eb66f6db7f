"""Write kubernetes/*.yaml and kubernetes/nats.conf from compose.yaml.

`python deploy/render_kubernetes.py`. Each service becomes a Deployment with probes, limits, a drain
before it stops, and a PodDisruptionBudget; NATS becomes a StatefulSet with its own storage.
Services that scale with load have a KEDA ScaledObject in `autoscaling.yaml`, separate since it
needs KEDA and Prometheus in the cluster. `kubectl apply -k deploy/kubernetes` applies the rest.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from manifests import ROOT, Document, dump, load_compose

HERE = Path(__file__).resolve().parent
OUTPUT = HERE / "kubernetes"
HEAD = "# Rendered from compose.yaml by deploy/render_kubernetes.py: edit the former, run the latter.\n"
CREDENTIALS, KEYS, MODELS = (
    "motet-nats-",
    "motet-api-keys",
    "motet-models",
)  # credentials: followed by a role
USER = 10001
DRAIN_SECONDS = 5  # until all proxies know that a pod is terminating
METRICS = 9100
HTTP = 8000
SERVICE_HOSTS = ("*.svc", "*.svc.cluster.local")  # names of the gateway's Service, in any namespace


class ScalingRule(NamedTuple):
    """Define how a service scales.

    query: its load, in PromQL. target: load per replica.
    """

    query: str
    target: int
    max_replicas: int


# Waiting and running work, from the instances' metrics; open streams for tokenizer and gateway.
AUTOSCALED = {
    "gateway": ScalingRule("sum(motet_active_streams) + sum(motet_active_sockets)", 500, 8),
    "tokenizer": ScalingRule('sum(motet_active{role="tokenizer"})', 200, 8),
    "decode": ScalingRule(
        'sum(motet_waiting{role="decode"}) + sum(motet_running{role="decode"})', 32, 16
    ),
    "asr": ScalingRule('sum(motet_active{role="asr"})', 8, 8),
    "tts": ScalingRule('sum(motet_active{role="tts"})', 8, 8),
}


class Workload:
    """Render one service of the compose file as manifests."""

    def __init__(self, name: str, compose: Document):
        self.name, self._compose = name, compose
        self.labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "motet"}

    def documents(self) -> list[Document]:
        """Return a Deployment, a PodDisruptionBudget, and a Service if it publishes a port."""
        found = [self._deployment(), self._disruption_budget()]
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
        if self.name in AUTOSCALED:  # else every `apply` would reset the replicas that KEDA has set
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
            mounts += [self._mount(volume) for volume in self._model_volumes]
        return {
            "name": self.name,
            "image": with_defaults(self._compose["image"]),
            "env": self._env(),
            "ports": [{"name": name, "containerPort": port} for name, port in self._ports.items()],
            "securityContext": container_security(),
            "resources": {"limits": {"memory": memory(self._compose["mem_limit"])}},
            **self._probes(),
            "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(DRAIN_SECONDS)]}}},
            "volumeMounts": mounts,
        }

    def _env(self) -> list[Document]:
        """Return the compose file's settings; API keys replace the options for a single machine."""
        excluded = ("MOTET_API_KEY", "MOTET_INSECURE")
        settings = {
            k: with_defaults(str(v))
            for k, v in self._compose["environment"].items()
            if k not in excluded
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
        """Return probes: a ready pod gets work, a pod that stops answering is replaced."""
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
        """Return the mount of a model folder, as a subfolder of the models volume."""
        source, target = with_defaults(volume).removesuffix(":ro").rsplit(":", 1)
        subpath = source.removeprefix("./models").strip("/")
        return {"name": "models", "mountPath": target, "readOnly": True} | (
            {"subPath": subpath} if subpath else {}
        )

    def _disruption_budget(self) -> Document:
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
        """Return the ports by name; probes use the first."""
        return ({"http": HTTP} if "ports" in self._compose else {}) | {"metrics": METRICS}

    @property
    def _has_models(self) -> bool:
        return bool(self._model_volumes)

    @property
    def _model_volumes(self) -> list[str]:
        """Return the compose file's volumes other than passwords, which are Secrets here."""
        return [
            volume for volume in self._compose.get("volumes", []) if not volume.startswith("nats-")
        ]


# -------------------------------------------------------------------------------------------------------------- helpers
def with_defaults(text: str) -> str:
    """Return a text of the compose file with variables replaced by their defaults."""
    while (replaced := re.sub(r"\$\{\w+:-([^${}]*)\}", r"\1", text)) != text:
        text = replaced
    return text


def replicas(compose: Document) -> int:
    """Return the initial number of replicas of a service."""
    return int(compose.get("scale", 0 if "profiles" in compose else 1))


def memory(limit: str) -> str:
    """Convert a memory limit to Kubernetes' units: 8g is 8Gi."""
    return re.sub(r"([gm])$", lambda unit: unit.group().upper() + "i", with_defaults(limit))


def secret_env(name: str, secret: str, key: str) -> Document:
    """Return an environment variable from a Secret."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def models_volume() -> Document:
    """Return the volume of the models."""
    return {"name": "models", "persistentVolumeClaim": {"claimName": MODELS, "readOnly": True}}


def pod_security() -> Document:
    """Return the security context of a pod."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Document:
    """Return the security context of a container."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def nats(compose: Document) -> list[Document]:
    """Return the NATS server as a StatefulSet of one and its Service.

    docs/scale.md describes clusters.
    """
    labels = {"app.kubernetes.io/name": "nats", "app.kubernetes.io/part-of": "motet"}
    container = {
        "name": "nats",
        "image": with_defaults(compose["image"]),
        "args": compose["command"],
        "env": [
            {
                "name": "MOTET_STORE_SIZE",
                "value": with_defaults(compose["environment"]["MOTET_STORE_SIZE"]),
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


def scaled_object(name: str, load: ScalingRule) -> Document:
    """Return a KEDA ScaledObject.

    It adds pods at once; after five minutes of low load it removes one a minute, but never the
    last.
    """
    trigger = {
        "type": "prometheus",
        "metadata": {
            "serverAddress": "http://prometheus.monitoring:9090",
            "query": load.query,
            "threshold": str(load.target),
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
            "maxReplicaCount": load.max_replicas,
            "pollingInterval": 5,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": down}}},
            "triggers": [trigger],
        },
    }


# -------------------------------------------------------------------------------------------------------------- writing
def rendered_files() -> dict[Path, str]:
    """Return the files' content by path."""
    services = load_compose()["services"]
    files = {"nats": nats(services["nats"])}
    for name, compose in services.items():
        if (
            with_defaults(compose["image"]).startswith("motet-")
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
    """Return the Kustomization of all files but the autoscaling rules."""
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "motet",
        "resources": [f"{name}.yaml" for name in files if name != "autoscaling"],
        "configMapGenerator": [{"name": "motet-nats", "files": ["nats.conf", "nats-store.conf"]}],
    }


if __name__ == "__main__":
    OUTPUT.mkdir(exist_ok=True)
    for path, text in rendered_files().items():
        path.write_text(text)
