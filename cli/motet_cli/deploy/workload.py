"""Build the manifests of one service: a Deployment, its disruption budget, its Service."""

from __future__ import annotations

from collections.abc import Mapping

from motet_cli.deploy.autoscaling import AUTOSCALED
from motet_cli.deploy.compose import Document, substitute
from motet_cli.deploy.pods import (
    CREDENTIALS,
    KEYS,
    container_security,
    labels,
    memory,
    models_volume,
    pod_security,
    secret_env,
)

DRAIN_SECONDS = 5  # until all proxies know that a pod is terminating
METRICS = 9100
HTTP = 8000
SERVICE_HOSTS = ("*.svc", "*.svc.cluster.local")  # names of the gateway's Service, in any namespace


class Workload:
    """Render one service of the compose file as manifests. given: values of its variables."""

    def __init__(self, name: str, compose: Document, given: Mapping[str, str]):
        self.name, self._compose, self._given = name, compose, given
        self.labels = labels(name)

    def documents(self) -> list[Document]:
        """Return a Deployment and a PodDisruptionBudget, and a Service where there are ports."""
        found = [self._deployment(), self._disruption_budget()]
        return [*found, self._service()] if "ports" in self._compose else found

    def _meta(self, suffix: str = "") -> Document:
        return {"name": self.name + suffix, "labels": self.labels}

    def _deployment(self) -> Document:
        spec: Document = {
            "replicas": self._replicas(),
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
            "image": self._value(self._compose["image"]),
            "env": self._env(),
            "ports": [{"name": name, "containerPort": port} for name, port in self._ports.items()],
            "securityContext": container_security(),
            "resources": {"limits": {"memory": memory(self._value(self._compose["mem_limit"]))}},
            **self._probes(),
            "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(DRAIN_SECONDS)]}}},
            "volumeMounts": mounts,
        }

    def _env(self) -> list[Document]:
        """Return the compose file's settings; API keys replace the options for a single machine."""
        excluded = ("MOTET_API_KEY", "MOTET_INSECURE")
        settings = {
            k: self._value(str(v))
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
        source, target = self._value(volume).removesuffix(":ro").rsplit(":", 1)
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

    def _replicas(self) -> int:
        """Return the initial number of replicas: none of a service with a profile."""
        return int(self._compose.get("scale", 0 if "profiles" in self._compose else 1))

    def _value(self, text: str) -> str:
        return substitute(text, self._given)
