"""Build the manifests of NATS: a StatefulSet of one with its own storage, and its Service."""

from __future__ import annotations

from collections.abc import Mapping

from motet_cli.deploy.compose import Document, substitute
from motet_cli.deploy.pods import CREDENTIALS, container_security, labels, memory, pod_security

_NAME, _PORT = "nats", 4222


def nats_server(compose: Document, given: Mapping[str, str]) -> list[Document]:
    """Return the StatefulSet and the Service; docs/scale.md describes more than one server."""
    meta = {"name": _NAME, "labels": labels(_NAME)}
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": meta,
            "spec": {
                "serviceName": _NAME,
                "replicas": 1,
                "selector": {"matchLabels": labels(_NAME)},
                "template": {
                    "metadata": {"labels": labels(_NAME)},
                    "spec": _pod(_container(compose, given)),
                },
                "volumeClaimTemplates": [_claim()],
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            "spec": {
                "selector": labels(_NAME),
                "ports": [{"name": "client", "port": _PORT, "targetPort": "client"}],
            },
        },
    ]


def _container(compose: Document, given: Mapping[str, str]) -> Document:
    size = substitute(compose["environment"]["MOTET_STORE_SIZE"], given)
    return {
        "name": _NAME,
        "image": substitute(compose["image"], given),
        "args": compose["command"],
        "env": [{"name": "MOTET_STORE_SIZE", "value": size}],
        "ports": [{"name": "client", "containerPort": _PORT}],
        "readinessProbe": {"tcpSocket": {"port": "client"}, "periodSeconds": 5},
        "livenessProbe": {
            "tcpSocket": {"port": "client"},
            "periodSeconds": 10,
            "failureThreshold": 6,
        },
        "securityContext": container_security(),
        "resources": {"limits": {"memory": memory(substitute(compose["mem_limit"], given))}},
        "volumeMounts": [
            {"name": "store", "mountPath": "/store"},
            {"name": "config", "mountPath": "/etc/nats"},
        ],
    }


def _pod(container: Document) -> Document:
    settings = {"configMap": {"name": "motet-nats"}}
    items = [{"key": "passwords.conf", "path": "server/passwords.conf"}]  # nats.conf includes it
    passwords = {"secret": {"name": CREDENTIALS + "server", "items": items}}
    projected = {"defaultMode": 0o440, "sources": [settings, passwords]}
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 30,
        "securityContext": pod_security(),
        "containers": [container],
        "volumes": [{"name": "config", "projected": projected}],
    }


def _claim() -> Document:
    return {
        "metadata": {"name": "store"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "4Gi"}}},
    }
