"""Serve the part of the Kubernetes API that the planner uses: scale subresources over HTTPS.

It checks what a real server checks (token, path, content type and content of a patch) and answers
with Scale objects, or with Status objects that describe the error.
"""

from __future__ import annotations

import contextlib
import json
import re
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from support.peers.certificates import self_signed

_PATH = re.compile(r"/apis/apps/v1/namespaces/([a-z0-9-]+)/deployments/([a-z0-9-]+)/scale")
_PATCHES = (
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
)


class KubernetesApi:
    """Serve the deployments of one namespace.

    replicas: by deployment. account: a pod's service account folder.
    """

    def __init__(self, folder: Path, namespace: str = "motet"):
        self.namespace = namespace
        self.replicas: dict[str, int] = {}
        self.requests: list[tuple[str, str]] = []
        self.token = "first"
        cert, key = self_signed(folder, "kubernetes")
        self.account = folder / "account"
        self.account.mkdir()
        (self.account / "ca.crt").write_bytes(cert.read_bytes())
        (self.account / "namespace").write_text(namespace + "\n")
        self.renew("first")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    @property
    def environ(self) -> dict[str, str]:
        return {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self._server.server_port),
        }

    def renew(self, token: str) -> None:
        """Accept only this token from now on, and write it to the service account folder."""
        self.token = token
        (self.account / "token").write_text(token)

    @contextlib.contextmanager
    def running(self) -> Iterator[KubernetesApi]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def answer(
        self, method: str, path: str, headers: Any, body: bytes
    ) -> tuple[int, dict[str, Any]]:
        self.requests.append((method, path))
        if headers.get("authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized", "Unauthorized")
        found = _PATH.fullmatch(path)
        if found is None:
            return _status(404, "NotFound", "the server could not find the requested resource")
        namespace, name = found.groups()
        if namespace != self.namespace:
            user = f"system:serviceaccount:{self.namespace}:planner"
            return _status(
                403,
                "Forbidden",
                f'deployments.apps "{name}" is forbidden: User "{user}" cannot patch it',
            )
        if name not in self.replicas:
            return _status(404, "NotFound", f'deployments.apps "{name}" not found')
        if method == "PATCH":
            if headers.get("content-type") not in _PATCHES:
                return _status(415, "UnsupportedMediaType", f"supported are {', '.join(_PATCHES)}")
            count = json.loads(body).get("spec", {}).get("replicas")
            if not isinstance(count, int) or count < 0:
                return _status(
                    422,
                    "Invalid",
                    "spec.replicas: Invalid value: must be greater than or equal to 0",
                )
            self.replicas[name] = count
        return 200, {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"replicas": self.replicas[name]}
            if self.replicas[name]
            else {},  # as Go leaves zeros out
            "status": {"replicas": 0, "selector": f"app={name}"},
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                code, document = api.answer(self.command, self.path, self.headers, body)
                data = json.dumps(document).encode()
                self.send_response(code)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PATCH = _serve

            def log_message(self, format: str, *args: Any) -> None:
                """Write nothing."""

        return Handler


def _status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": message,
    }
    return code, {**status, "code": code}
