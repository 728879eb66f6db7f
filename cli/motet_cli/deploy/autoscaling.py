"""Build KEDA's ScaledObjects: services that are scaled by the work that waits and runs."""

from __future__ import annotations

from typing import NamedTuple

from motet_cli.deploy.compose import Document


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


def scaled_object(name: str, rule: ScalingRule) -> Document:
    """Return a ScaledObject: scales up at once, and down by one pod a minute after five quiet ones."""
    trigger = {
        "type": "prometheus",
        "metadata": {
            "serverAddress": "http://prometheus.monitoring:9090",
            "query": rule.query,
            "threshold": str(rule.target),
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
            "maxReplicaCount": rule.max_replicas,
            "pollingInterval": 5,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": down}}},
            "triggers": [trigger],
        },
    }
