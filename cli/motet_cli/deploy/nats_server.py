"""Build the manifests of NATS: a StatefulSet of its servers, each with its own storage, and their Services."""

from __future__ import annotations

from collections.abc import Mapping

from motet_cli.deploy.compose import Document, substitute
from motet_cli.deploy.nats_topology import FOLDER, PEER, STORE, NatsTopology
from motet_cli.deploy.pods import CREDENTIALS, container_security, labels, memory, pod_security

_NAME, _PORT = "nats", 4222
MEMBERS = "nats-servers"  # Service by whose name members of a cluster find each other
LEAFNODES = "nats-leafnodes"  # Service for leaf nodes
_PEER_SECRET = CREDENTIALS + "peer"  # ca.crt, tls.crt and tls.key


def nats_server(
    compose: Document, given: Mapping[str, str], topology: NatsTopology
) -> list[Document]:
    """Return the manifests of the servers of a topology."""
    found = [_stateful_set(compose, given, topology), _service(_NAME, {"client": _PORT})]
    if topology.servers > 1:
        inner = _service(MEMBERS, {"client": _PORT, **topology.ports})
        inner["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}
        found += [inner, _disruption_budget()]
    if topology.leafnodes:
        outer = _service(LEAFNODES, {"leafnodes": topology.ports["leafnodes"]})
        outer["spec"]["type"] = "LoadBalancer"
        found.append(outer)
    return found


def _stateful_set(compose: Document, given: Mapping[str, str], topology: NatsTopology) -> Document:
    spec: Document = {
        "serviceName": MEMBERS if topology.servers > 1 else _NAME,
        "replicas": topology.servers,
        "selector": {"matchLabels": labels(_NAME)},
        "template": {
            "metadata": {"labels": labels(_NAME)},
            "spec": _pod(_container(compose, given, topology), topology),
        },
    }
    if topology.servers > 1:  # none is ready before a majority runs
        spec["podManagementPolicy"] = "Parallel"
    if not topology.leaf:
        spec["volumeClaimTemplates"] = [_claim()]
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _meta(_NAME),
        "spec": spec,
    }


def _meta(name: str) -> Document:
    return {"name": name, "labels": labels(_NAME)}


def _service(name: str, ports: Mapping[str, int]) -> Document:
    listed = [{"name": key, "port": port, "targetPort": key} for key, port in ports.items()]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(name),
        "spec": {"selector": labels(_NAME), "ports": listed},
    }


def _disruption_budget() -> Document:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _meta(_NAME),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(_NAME)}},
    }


def _container(compose: Document, given: Mapping[str, str], topology: NatsTopology) -> Document:
    size = substitute(compose["environment"]["MOTET_STORE_SIZE"], given)
    env: list[Document] = [] if topology.leaf else [{"name": "MOTET_STORE_SIZE", "value": size}]
    env += [{"name": name, "value": value} for name, value in topology.environment().items()]
    if topology.servers > 1:
        pod = {"fieldRef": {"fieldPath": "metadata.name"}}
        env.append({"name": "MOTET_NATS_NAME", "valueFrom": pod})
    mounts: list[Document] = [{"name": "config", "mountPath": FOLDER}]
    if not topology.leaf:
        mounts.insert(0, {"name": "store", "mountPath": STORE})
    if topology.needs_certificate:
        mounts.append({"name": "peer", "mountPath": PEER, "readOnly": True})
    ports = {"client": _PORT, **topology.ports}
    return {
        "name": _NAME,
        "image": substitute(compose["image"], given),
        "args": topology.arguments,
        "env": env,
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "readinessProbe": {"tcpSocket": {"port": "client"}, "periodSeconds": 5},
        "livenessProbe": {
            "tcpSocket": {"port": "client"},
            "periodSeconds": 10,
            "failureThreshold": 6,
        },
        "securityContext": container_security(),
        "resources": {"limits": {"memory": memory(substitute(compose["mem_limit"], given))}},
        "volumeMounts": mounts,
    }


def _pod(container: Document, topology: NatsTopology) -> Document:
    settings = {"configMap": {"name": "motet-nats"}}
    items = [{"key": name, "path": f"server/{name}"} for name in topology.secrets]
    passwords = {"secret": {"name": CREDENTIALS + "server", "items": items}}
    projected = {"defaultMode": 0o440, "sources": [settings, passwords]}
    volumes: list[Document] = [{"name": "config", "projected": projected}]
    if topology.needs_certificate:
        secret = {"secretName": _PEER_SECRET, "defaultMode": 0o440}
        volumes.append({"name": "peer", "secret": secret})
    pod: Document = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 30,
        "securityContext": pod_security(),
        "containers": [container],
        "volumes": volumes,
    }
    if topology.servers > 1:  # a node that is lost takes one of them
        pod["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": labels(_NAME)},
            }
        ]
    return pod


def _claim() -> Document:
    return {
        "metadata": {"name": "store"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "4Gi"}}},
    }
