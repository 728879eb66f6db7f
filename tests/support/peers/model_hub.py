"""Serve repositories of a model hub on loopback: the hub's HTTP API over folders, with faults.

The parts of the API that huggingface_hub calls to resolve a revision, list files and download them,
as the hub documents them: `/api/models/{repo}/revision/{revision}`, `…/tree/{commit}` and
`/{repo}/resolve/{commit}/{path}` with ETag, X-Repo-Commit and Range. Files of at least LFS_BYTES are
listed with their SHA-256, smaller ones with git's blob hash.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LFS_BYTES = 1024
COMMIT = "c" * 40
_API = re.compile(
    r"/api/models/(?P<repo>[^/]+/[^/]+?)(?:/(?P<what>revision|tree)/(?P<revision>.+))?"
)
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class Repository:
    """Hold the files of the default branch's only commit, and the faults to serve them with."""

    files: dict[str, bytes]
    token: str | None = None  # required to read it
    cut_after: int | None = None  # bytes of a body after which the connection closes, once per file
    damaged: str | None = None  # path of a file that is served with its last byte changed
    status: int | None = None  # of every answer
    busy: int = 0  # requests that are answered with 429 and Retry-After first


@dataclass
class ModelHub:
    """Serve repositories by name and count the requests of each path."""

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # (method, path)
    cuts: set[str] = field(default_factory=set)  # paths that were cut already

    def downloads(self, suffix: str) -> int:
        """Return how many GET requests were made for paths with this end."""
        return sum(
            n
            for (method, path), n in self.requests.items()
            if method == "GET" and path.endswith(suffix)
        )


@contextmanager
def model_hub(**repositories: Repository) -> Iterator[ModelHub]:
    """Serve repositories, given as org__name=Repository(…), until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    served = ModelHub(f"http://127.0.0.1:{server.server_port}")
    served.repositories = {name.replace("__", "/", 1): one for name, one in repositories.items()}
    server.hub = served  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def blob_hash(data: bytes) -> str:
    """Return the ETag of a file: SHA-256 of a large one, git's blob hash of a small one."""
    if len(data) >= LFS_BYTES:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: object) -> None:
        """Write nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    @property
    def _hub(self) -> ModelHub:
        return self.server.hub  # type: ignore[attr-defined]

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self._hub.requests[self.command, path] += 1
        match = _FILE.fullmatch(path) or _API.fullmatch(path)
        repository = self._hub.repositories.get(match["repo"]) if match else None
        if match is None or repository is None:
            return self._refuse(404, "RepoNotFound")
        if repository.busy > 0:
            repository.busy -= 1
            return self._send(429, b"{}", {"Retry-After": "0"})
        if repository.status is not None:
            return self._refuse(repository.status, "")
        if repository.token and self.headers["Authorization"] != f"Bearer {repository.token}":
            return self._refuse(401, "GatedRepo")
        if match.groupdict().get("revision") not in (None, "main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        if match.re is _FILE:
            return self._send_file(repository, match["path"])
        return self._send_json(
            _tree(repository) if match["what"] == "tree" else _info(match["repo"], repository)
        )

    def _send_file(self, repository: Repository, path: str) -> None:
        if (data := repository.files.get(path)) is None:
            return self._refuse(404, "EntryNotFound")
        etag = blob_hash(data)
        if path == repository.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if self.headers["Range"] else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data) - start))
        if self.headers["Range"]:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self._send_body(repository, path, data[start:])

    def _send_body(self, repository: Repository, path: str, body: bytes) -> None:
        if (
            repository.cut_after is not None
            and path not in self._hub.cuts
            and len(body) > repository.cut_after
        ):
            self._hub.cuts.add(path)
            body, self.close_connection = body[: repository.cut_after], True
        self.wfile.write(body)

    def _send_json(self, document: object) -> None:
        self._send(200, json.dumps(document).encode(), {})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "X-Repo-Commit": COMMIT,
            **headers,
        }.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _info(name: str, repository: Repository) -> dict[str, object]:
    files = [{"rfilename": path} for path in repository.files]
    return {
        "id": name,
        "modelId": name,
        "sha": COMMIT,
        "private": False,
        "siblings": files,
        "tags": [],
    }


def _tree(repository: Repository) -> list[dict[str, object]]:
    return [_entry(path, data) for path, data in repository.files.items()]


def _entry(path: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {
        "type": "file",
        "path": path,
        "size": len(data),
        "oid": blob_hash(data),
    }
    if len(data) >= LFS_BYTES:
        entry["lfs"] = {"oid": blob_hash(data), "size": len(data), "pointerSize": 134}
    return entry
