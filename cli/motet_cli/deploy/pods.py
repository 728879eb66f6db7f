"""Build what the pods of all services have in common."""

from __future__ import annotations

import re

from motet_cli.deploy.compose import Document

CREDENTIALS, KEYS, MODELS = (
    "motet-nats-",
    "motet-api-keys",
    "motet-models",
)  # credentials: followed by a role
USER = 10001


def labels(name: str) -> dict[str, str]:
    """Return the labels of a service."""
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "motet"}


def memory(limit: str) -> str:
    """Convert a memory limit to Kubernetes' units: 8g is 8Gi."""
    return re.sub(r"([gm])$", lambda unit: unit.group().upper() + "i", limit)


def secret_env(name: str, secret: str, key: str) -> Document:
    """Return a variable whose value is a key of a Secret."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def models_volume() -> Document:
    """Return the volume of all models, read only."""
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
