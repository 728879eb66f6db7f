"""Scale Deployments of Kubernetes through the API's scale subresource, as the pod's account.

The service account needs `get` and `patch` on `deployments/scale` of its namespace, and nothing
else.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from motet_planner.actuators.actuator import ActuatorError
from motet_shared.errors import ConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT = 10.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Address and credentials of the API.

    The token is read for each request: Kubernetes renews it.
    """

    url: str
    namespace: str
    token_file: Path
    ca_file: Path

    @classmethod
    def of_this_pod(
        cls, account: Path = ACCOUNT, environ: Mapping[str, str] = os.environ
    ) -> Cluster:
        """Return the cluster of this pod.

        Raises ConfigError outside of a pod, or in one without a service account.
        """
        host, port = (
            environ.get("KUBERNETES_SERVICE_HOST"),
            environ.get("KUBERNETES_SERVICE_PORT", "443"),
        )
        if not host:
            raise ConfigError(
                "actuator: 'kubernetes' needs KUBERNETES_SERVICE_HOST, which every pod has; run it in a pod, or use"
                " another actuator",
                param="actuator",
            )
        try:
            namespace = (account / "namespace").read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"actuator: cannot read {str(account / 'namespace')!r}: {error.strerror}; give the pod a service"
                " account",
                param="actuator",
            ) from None
        address = f"[{host}]" if ":" in host else host
        return cls(
            url=f"https://{address}:{port}",
            namespace=namespace,
            token_file=account / "token",
            ca_file=account / "ca.crt",
        )


class Kubernetes:
    """Scale Deployments by `name` in the cluster's namespace."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        try:
            verify = ssl.create_default_context(cafile=str(cluster.ca_file))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"actuator: {str(cluster.ca_file)!r} is no certificate: {error}", param="actuator"
            ) from None
        self._http = httpx.AsyncClient(
            base_url=cluster.url, verify=verify, timeout=TIMEOUT, trust_env=False
        )

    async def count(self, name: str) -> int | None:
        return int((await self._ask("GET", name)).get("spec", {}).get("replicas", 0))

    async def scale(self, name: str, count: int) -> None:
        """Patch the replicas alone: what others set in the deployment stays."""
        await self._ask("PATCH", name, {"spec": {"replicas": count}})

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(
        self, method: str, name: str, patch: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        path = f"/apis/apps/v1/namespaces/{self._cluster.namespace}/deployments/{name}/scale"
        try:
            token = self._cluster.token_file.read_text().strip()
            headers = {"authorization": f"Bearer {token}", "accept": "application/json"}
            if patch is not None:
                headers["content-type"] = "application/merge-patch+json"
            answer = await self._http.request(method, path, headers=headers, json=patch)
            document: dict[str, Any] = answer.json()
        except (OSError, httpx.HTTPError, ValueError) as error:
            raise ActuatorError(f"{method} {path}: {error or type(error).__name__}") from None
        if answer.status_code != 200:
            raise ActuatorError(
                f"{method} {path}: {answer.status_code}: {document.get('message', 'no message')}"
            )
        return document
