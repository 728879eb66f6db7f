"""Write manifests for Kubernetes.

Each service becomes a Deployment with probes, limits, a drain before it stops, and a
PodDisruptionBudget; NATS a StatefulSet with storage of its own. What scales with load has a
ScaledObject of KEDA in `autoscaling.yaml`, which no kustomization names: it needs KEDA and
Prometheus in the cluster. Nor does one name `large-model.yaml`, for a model on several hosts.
"""

from __future__ import annotations

from collections.abc import Mapping

from motet_cli.deploy.autoscaling import AUTOSCALED, scaled_object
from motet_cli.deploy.compose import Document, dump, load_compose, substitute
from motet_cli.deploy.large_model import large_model
from motet_cli.deploy.nats_server import nats_server
from motet_cli.deploy.nats_topology import NatsTopology
from motet_cli.deploy.workload import Workload
from motet_shared import __version__

HEAD = f"# Made by `motet deploy kubernetes`, motet {__version__}.\n"
_ELSEWHERE = ("store", "credentials")  # what they make are claims and secrets here


def kubernetes_files(
    given: Mapping[str, str], topology: NatsTopology | None = None
) -> dict[str, str]:
    """Return the text of each file by name.

    given: values of variables of compose.yaml. topology: NATS servers, by default one.
    """
    topology = topology or NatsTopology()
    services = load_compose()["services"]
    files = {"nats": nats_server(services["nats"], given, topology)}
    for name, compose in services.items():
        if _is_workload(name, compose, given):
            files[name] = Workload(name, compose, given).documents()
    found = {f"{name}.yaml": HEAD + dump(*documents) for name, documents in files.items()}
    scaled = [scaled_object(name, rule) for name, rule in AUTOSCALED.items()]
    found["autoscaling.yaml"] = HEAD + dump(*scaled)
    found["large-model.yaml"] = HEAD + dump(*large_model(services["decode"], given))
    configs = topology.configs()
    found["kustomization.yaml"] = HEAD + dump(_kustomization(list(files), list(configs)))
    return found | configs


def _is_workload(name: str, compose: Document, given: Mapping[str, str]) -> bool:
    image = substitute(compose["image"], given)
    ours = image.rpartition("/")[2].startswith("motet-")
    return ours and name not in _ELSEWHERE and not name.endswith("-gpu")


def _kustomization(names: list[str], configs: list[str]) -> Document:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "motet",
        "resources": [f"{name}.yaml" for name in names],
        "configMapGenerator": [{"name": "motet-nats", "files": configs}],
    }
