"""The table of routes: who may call what, what other methods and paths get, and that nothing is reached beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route as StarletteRoute
from starlette.routing import WebSocketRoute

from motet_gateway.http.app import App
from motet_gateway.http.guard import Guard
from motet_gateway.http.route import SOCKET, Access, Route, Serving
from motet_gateway.routes import ROUTES
from motet_shared.tenants import digest
from support.clients.gateway_client import Http, Socket, World, world

PUBLIC, TENANT, OPERATOR = Access.PUBLIC, Access.TENANT, Access.OPERATOR
EXPECTED = {
    ("POST", "/v1/chat/completions"): TENANT,
    ("POST", "/v1/completions"): TENANT,
    ("POST", "/v1/embeddings"): TENANT,
    ("POST", "/v1/rerank"): TENANT,
    ("POST", "/rerank"): TENANT,
    ("POST", "/v2/rerank"): TENANT,
    ("POST", "/v1/score"): TENANT,
    ("POST", "/score"): TENANT,
    ("POST", "/tokenize"): TENANT,
    ("POST", "/detokenize"): TENANT,
    ("POST", "/v1/messages"): TENANT,
    ("POST", "/v1/messages/count_tokens"): TENANT,
    ("POST", "/api/chat"): TENANT,
    ("POST", "/api/generate"): TENANT,
    ("POST", "/api/embed"): TENANT,
    ("POST", "/api/embeddings"): TENANT,
    ("POST", "/api/show"): TENANT,
    ("GET", "/api/tags"): TENANT,
    ("GET", "/api/ps"): TENANT,
    ("POST", "/api/create"): TENANT,
    ("POST", "/api/copy"): TENANT,
    ("POST", "/api/push"): TENANT,
    ("POST", "/api/blobs/{digest}"): TENANT,
    ("DELETE", "/api/delete"): TENANT,
    ("POST", "/api/pull"): OPERATOR,
    ("GET", "/api/version"): PUBLIC,
    ("POST", "/v1/responses"): TENANT,
    ("DELETE", "/v1/responses"): TENANT,
    ("GET", "/v1/responses/{response_id}"): TENANT,
    ("DELETE", "/v1/responses/{response_id}"): TENANT,
    ("POST", "/v1/responses/{response_id}/cancel"): TENANT,
    ("GET", "/v1/responses/{response_id}/input_items"): TENANT,
    ("POST", "/v1/files"): TENANT,
    ("GET", "/v1/files"): TENANT,
    ("GET", "/v1/files/{file_id}"): TENANT,
    ("GET", "/v1/files/{file_id}/content"): TENANT,
    ("DELETE", "/v1/files/{file_id}"): TENANT,
    ("POST", "/v1/batches"): TENANT,
    ("GET", "/v1/batches"): TENANT,
    ("GET", "/v1/batches/{batch_id}"): TENANT,
    ("POST", "/v1/batches/{batch_id}/cancel"): TENANT,
    ("POST", "/v1/audio/transcriptions"): TENANT,
    ("POST", "/v1/audio/translations"): TENANT,
    ("POST", "/v1/audio/speech"): TENANT,
    ("GET", "/v1/audio/voices"): TENANT,
    ("POST", "/v1/audio/voices"): TENANT,
    ("DELETE", "/v1/audio/voices/{voice_id}"): TENANT,
    ("POST", "/v1/images/generations"): TENANT,
    ("POST", "/v1/images/edits"): TENANT,
    ("POST", "/v1/videos"): TENANT,
    ("GET", "/v1/videos"): TENANT,
    ("GET", "/v1/videos/{video_id}"): TENANT,
    ("DELETE", "/v1/videos/{video_id}"): TENANT,
    ("GET", "/v1/videos/{video_id}/content"): TENANT,
    ("POST", "/v1/videos/{video_id}/remix"): TENANT,
    ("POST", "/v1/images/jobs"): TENANT,
    ("GET", "/v1/images/jobs/{job}"): TENANT,
    ("DELETE", "/v1/images/jobs/{job}"): TENANT,
    ("GET", "/v1/models"): TENANT,
    ("GET", "/v1/models/{name:path}"): TENANT,
    (SOCKET, "/v1/audio/speech/stream"): TENANT,
    (SOCKET, "/v1/realtime"): TENANT,
    ("POST", "/v1/realtime/client_secrets"): TENANT,
    ("POST", "/v1/realtime/calls"): TENANT,
    ("POST", "/v1/realtime/calls/{call_id}/hangup"): TENANT,
    ("GET", "/metrics"): OPERATOR,
    ("GET", "/metrics/stack"): OPERATOR,
    ("GET", "/metrics/doctor"): OPERATOR,
    ("GET", "/metrics/replies"): OPERATOR,
    ("POST", "/v1/load_lora_adapter"): OPERATOR,
    ("POST", "/v1/unload_lora_adapter"): OPERATOR,
    ("GET", "/health"): PUBLIC,
    ("GET", "/health/live"): PUBLIC,
    ("GET", "/health/ready"): PUBLIC,
    ("GET", "/version"): PUBLIC,
    ("GET", "/images/{name}"): PUBLIC,
    ("GET", "/openapi.json"): PUBLIC,
}
PAGE = (".js", ".css", ".html", ".svg", ".txt")
TENANTS = """
[tenants.plain]
[tenants.watching]
metrics = true
[[keys]]
tenant = "plain"
sha256 = "{plain}"
created = 2026-11-22
[[keys]]
tenant = "watching"
sha256 = "{watching}"
created = 2026-11-22
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def is_page(path: str) -> bool:
    return path == "/" or path.endswith(PAGE)


def named(route: Route) -> str:
    return f"{route.method} {route.path}"


def test_the_table_is_the_expected_one() -> None:
    table = {(route.method, route.path): route.access for route in ROUTES}
    page = {key: access for key, access in table.items() if is_page(key[1])}
    assert {key: access for key, access in table.items() if key not in page} == EXPECTED
    assert {(method, access) for (method, _), access in page.items()} == {("GET", PUBLIC)}
    assert ("GET", "/") in page


async def test_the_router_serves_what_is_in_the_table_and_nothing_else() -> None:
    async with world() as here:
        registered = [
            made
            for made in here.app.api.router.routes
            if isinstance(made, StarletteRoute | WebSocketRoute)
        ]
        served = [
            (method, made.path)
            for made in registered
            for method in sorted(getattr(made, "methods", None) or [SOCKET])
        ]
        assert len(here.app.api.router.routes) == len(ROUTES)
        table = [(method, route.path) for route in ROUTES for method in route.methods]
        assert sorted(served) == sorted(table)
        assert all(isinstance(made.app, Guard) for made in registered)


def test_nothing_is_declared_without_saying_who_may_call() -> None:
    async def handler() -> None: ...

    with pytest.raises(TypeError):
        Route("POST", "/open")  # type: ignore[call-arg]
    for access in (None, "public"):
        with pytest.raises(TypeError, match="/open"):
            Route("POST", "/open", access, handler, Serving.STREAM)  # type: ignore[arg-type]


async def test_nothing_is_declared_twice() -> None:
    async with world() as here:
        with pytest.raises(ValueError, match="/version"):
            App(here.service, (*ROUTES, next(r for r in ROUTES if r.path == "/version")))


# --------------------------------------------------------------------------------------------------------- who may call
KEYS = {"no key": {}, "tenant": bearer("plain-key"), "operator": bearer("watching-key")}
REFUSED = {  # status by caller and access; 0: the endpoint answers, whatever it says
    ("no key", PUBLIC): 0,
    ("no key", TENANT): 401,
    ("no key", OPERATOR): 401,
    ("tenant", PUBLIC): 0,
    ("tenant", TENANT): 0,
    ("tenant", OPERATOR): 403,
    ("operator", PUBLIC): 0,
    ("operator", TENANT): 0,
    ("operator", OPERATOR): 0,
}


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    file.write_text(TENANTS.format(plain=digest("plain-key"), watching=digest("watching-key")))
    return file


@pytest.mark.parametrize("caller", KEYS)
async def test_who_may_call(caller: str, tenants: Path) -> None:
    """Every route of the table, as it is served, for everyone who may and may not call it."""
    async with world(tenants_file=tenants) as here:
        for route in ROUTES:
            status = await answered(here, route, KEYS[caller])
            expected = REFUSED[caller, route.access]
            assert (status if status in (401, 403) else 0) == expected, named(route)
            assert status != 500, named(route)


async def answered(here: World, route: Route, headers: dict[str, str]) -> int:
    """Return the status of an answer; of a socket, as its error event says it."""
    url = re.sub(r"{(\w+)(:\w+)?}", "x.png", route.path)
    if route.method != SOCKET:
        return (await Http(here.app, url, b"{}", route.method, headers).done()).status
    socket = Socket(here.app, headers=headers)
    event = await socket.receive()
    await socket.leave()
    code = event.get("error", {}).get("code")
    return {"invalid_api_key": 401, "forbidden": 403}.get(code, 0)


# ------------------------------------------------------------------------------------------------- methods and paths
async def answer(here: World, method: str, path: str) -> tuple[int, str, str | None]:
    http = await Http(here.app, path, b"{}", method).done()
    return http.status, http.json()["error"]["code"], http.headers.get("allow")


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
NOWHERE = (
    "/v1/nothing",
    "/nothing",
    "/v1/message",
    "/health/nothing",
    "/v1",
    "/common/style.css/more",
)


@pytest.mark.parametrize("path", NOWHERE)
async def test_unknown_paths(path: str) -> None:
    """404 for every method and caller: a key changes nothing."""
    async with world(api_key="sesame") as here:
        for method in METHODS:
            for headers in ({}, bearer("sesame")):
                http = await Http(here.app, path, b"{}", method, headers).done()
                assert (http.status, http.json()["error"]["code"]) == (404, "not_found"), method


async def test_wrong_methods() -> None:
    """405 for every path and each method that it does not take, with those that it takes."""
    async with world() as here:
        paths = {route.path for route in ROUTES if route.method != SOCKET}
        for path in paths:
            url = re.sub(r"{(\w+)(:\w+)?}", "x", path)
            methods = [m for route in ROUTES if route.path == path for m in route.methods]
            for method in set(METHODS) - set(methods):
                status, code, allow = await answer(here, method, url)
                assert (status, code) == (405, "method_not_allowed"), (method, path)
                assert allow is not None
                assert sorted(allow.split(", ")) == sorted(methods)
        assert (await answer(here, "GET", "/v1/realtime"))[0] == 404, "a WebSocket only"


async def test_a_socket_to_an_unknown_path_is_refused_before_its_upgrade() -> None:
    async with world() as here:
        sent: list[dict[str, object]] = []

        async def receive() -> dict[str, str]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "websocket",
            "path": "/v1/nothing",
            "query_string": b"",
            "headers": [(b"host", b"here.localhost")],
            "extensions": {"websocket.http.response": {}},
        }
        await here.app(scope, receive, send)
        assert sent[0]["status"] == 404


async def test_health_is_readiness() -> None:
    async with world() as here:
        short, ready = await here.get("/health").done(), await here.get("/health/ready").done()
        assert (short.status, short.json()) == (ready.status, ready.json())
        assert short.status == 200
        assert (await Http(here.app, "/health", b"", "HEAD").done()).status == 200
        here.service.limits.draining = True
        assert (await here.get("/health").done()).status == 503
