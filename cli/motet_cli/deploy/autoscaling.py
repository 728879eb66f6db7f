"""Build KEDA's ScaledObjects: services that are scaled by the work that waits and runs."""

from __future__ import annotations

from typing import NamedTuple

from motet_cli.deploy.compose import Document


class Load(NamedTuple):
    """Load of a service: `query` for Prometheus, how much of it one replica takes, most replicas."""

    query: str
    each: int
    most: int


# Work that waits or runs, as every instance reports it; the tokenizer and the gateway are bound by
# what is open.
AUTOSCALED = {
    "gateway": Load("sum(motet_active_streams) + sum(motet_active_sockets)", 500, 8),
    "tokenizer": Load('sum(motet_active{role="tokenizer"})', 200, 8),
    "decode": Load('sum(motet_waiting{role="decode"}) + sum(motet_running{role="decode"})', 32, 16),
    "asr": Load('sum(motet_active{role="asr"})', 8, 8),
    "tts": Load('sum(motet_active{role="tts"})', 8, 8),
}


def scaled_object(name: str, load: Load) -> Document:
    """Return a ScaledObject: new pods at once, one less after five quiet minutes, at least one."""
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
