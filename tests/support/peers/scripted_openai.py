"""Serve scripted completions with OpenAI's API on a free loopback port."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from support.peers.scripted_http import ScriptedHandler, ScriptedServer


class OpenAIServer(ScriptedServer):
    """Answer each completion with `script`, a token per event, from the length of its prompt on.

    model: its entry in the list of models. prompt: number of tokens of a prompt without output.
    knows_ids: it returns `token_ids`. takes_ids: its completions take token ids.
    pause_at: position at which a reply waits for `go_on`. failure: status and body of refusals.
    """

    def __init__(self, script: list[int], pieces: list[str], **model: Any):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.pieces = script, pieces
        self.model = {"id": "their-model", "object": "model", "owned_by": "vllm"} | model
        self.adapters: list[dict[str, Any]] = []
        self.prompt = 0
        self.knows_ids = self.takes_ids = True
        self.refuses_unknown = self.refuses_pictures = False
        self.failure: tuple[int, dict[str, Any]] | None = None
        self.break_at = -1  # position at which the connection breaks
        self.finish = ""  # reason in place of that for which a reply ends
        self.pause_at = -1
        self.go_on = threading.Event()
        self.paused = threading.Event()
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.metrics = ""
        self.cancelled = 0
        self.down = False  # answers 500 to everything

    @property
    def base(self) -> str:
        return f"{self.url}/v1"


class _Handler(ScriptedHandler):
    server: OpenAIServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.server.down:
            self.answer(500, {"error": {"message": "down"}})
        elif self.path == "/v1/models":
            self.answer(200, {"object": "list", "data": [self.server.model, *self.server.adapters]})
        elif self.path == "/metrics":
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.server.metrics)))
            self.end_headers()
            self.wfile.write(self.server.metrics.encode())
        else:
            self.answer(404, {"error": {"message": self.path}})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server.keys.append(self.headers.get("authorization"))
        if server.down:
            return self.answer(500, {"error": {"message": "down"}})
        if server.refuses_unknown and "return_token_ids" in body:
            return self.answer(400, {"error": {"message": "unknown", "param": "return_token_ids"}})
        if server.refuses_pictures and "image_url" in str(body.get("messages")):
            return self.answer(400, {"error": {"message": "no pictures"}})
        if self.path == "/v1/completions" and not server.takes_ids:
            return self.answer(400, {"error": {"message": "`prompt` must be a text"}})
        if not body.get("stream"):
            return self.answer(200, {"choices": [self._choice(0, body)]})
        server.bodies.append(body)
        if server.failure is not None:
            return self.answer(*server.failure)
        self._stream(body)

    def _stream(self, body: dict[str, Any]) -> None:
        server = self.server
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        first = len(body["prompt"]) - server.prompt if "prompt" in body else 0
        limit = body.get("max_tokens")
        end = len(server.script) if limit is None else min(len(server.script), first + limit)
        try:
            for at in range(first, end):
                if at == server.break_at:
                    server.break_at = -1
                    return
                if at == server.pause_at:
                    self._pause()
                self._event({"choices": [self._choice(at, body)]})
            finish = server.finish or ("length" if end < len(server.script) else "stop")
            self._event({"choices": [self._last(finish)]})
            details = {"prompt_tokens_details": {"cached_tokens": 3}}
            self._event({"choices": [], "usage": details})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            server.cancelled += 1
        finally:
            self.close_connection = True

    def _pause(self) -> None:
        """Wait for `go_on`; a client that leaves meanwhile is noticed by its end of file."""
        self.server.paused.set()
        self.connection.settimeout(0.02)
        until = time.monotonic() + 20
        while not self.server.go_on.is_set() and time.monotonic() < until:
            try:
                if self.connection.recv(1) == b"":
                    raise ConnectionResetError
            except TimeoutError:
                continue
        self.connection.settimeout(None)

    def _choice(self, at: int, body: dict[str, Any]) -> dict[str, Any]:
        number = self.server.script[at]
        if self.path == "/v1/chat/completions":
            return {"index": 0, "delta": {"content": self.server.pieces[number]}}
        choice: dict[str, Any] = {"index": 0, "text": self.server.pieces[number]}
        if body.get("return_token_ids") and self.server.knows_ids:
            choice["token_ids"] = [number]
        if body.get("logprobs") is not None:
            name = f"token_id:{number}"
            choice["logprobs"] = {
                "tokens": [name],
                "token_logprobs": [-0.5],
                "top_logprobs": [{"token_id:1": -2.0, name: -0.5}],
            }
        return choice

    def _last(self, finish: str) -> dict[str, Any]:
        if self.path == "/v1/chat/completions":
            return {"index": 0, "delta": {}, "finish_reason": finish}
        return {"index": 0, "text": "", "finish_reason": finish}

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()
