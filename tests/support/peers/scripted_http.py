"""Serve scripted HTTP responses on a free loopback port."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedServer(ThreadingHTTPServer):
    daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()
            thread.join()


class ScriptedHandler(BaseHTTPRequestHandler):
    def answer(self, status: int, body: dict[str, Any]) -> None:
        """Send a JSON response."""
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass
