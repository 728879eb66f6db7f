"""The table of routes: who may call what, what other methods and paths get, and that nothing is reached beside it."""

from __future__ import annotations

from typing import Any

import pytest

from motet_gateway.http.routes import SOCKET, Access, Route, Router, RouteTable
from motet_shared.tenants import digest
from support.gateway_client import Http, World, world

PUBLIC, TENANT, METRICS = Access.PUBLIC, Access.TENANT, Access.METRICS
EXPECTED = {
    ("POST", "/v1/chat/completions"): TENANT,
    ("POST", "/v1/completions"): TENANT,
    ("POST", "/v1/embeddings"): TENANT,
    ("POST", "/v1/audio/transcriptions"): TENANT,
    ("POST", "/v1/audio/translations"): TENANT,
    ("POST", "/v1/audio/speech"): TENANT,
    ("GET", "/v1/audio/voices"): TENANT,
    ("POST", "/v1/images/generations"): TENANT,
    ("POST", "/v1/images/edits"): TENANT,
    ("POST", "/v1/images/jobs"): TENANT,
    ("GET", "/v1/images/jobs/{job}"): TENANT,
    ("DELETE", "/v1/images/jobs/{job}"): TENANT,
    ("GET", "/v1/models"): TENANT,
    ("GET", "/v1/models/{name:path}"): TENANT,
    (SOCKET, "/v1/realtime"): TENANT,
    ("GET", "/metrics"): METRICS,
    ("GET", "/metrics/stack"): METRICS,
    ("GET", "/metrics/doctor"): METRICS,
    ("GET", "/metrics/replies"): METRICS,
    ("GET", "/health"): PUBLIC,
    ("GET", "/health/live"): PUBLIC,
    ("GET", "/health/ready"): PUBLIC,
    ("GET", "/version"): PUBLIC,
    ("GET", "/images/{name}"): PUBLIC,
    ("GET", "/openapi.json"): PUBLIC,
}
PAGE = (".js", ".css", ".html", ".svg")
BOUNDED = """
[tenants.plain]
[[keys]]
tenant = "plain"
sha256 = "%s"
created = 2026-11-22
"""


def is_page(path: str) -> bool:
    return path == "/" or path.endswith(PAGE)


async def test_the_table_is_the_expected_one() -> None:
    async with world() as here:
        table = {(route.method, route.path): route.access for route in here.app.routes}
        page = {key: access for key, access in table.items() if is_page(key[1])}
        assert {key: access for key, access in table.items() if key not in page} == EXPECTED
        assert {(method, access) for (method, _), access in page.items()} == {("GET", PUBLIC)}
        assert ("GET", "/") in page


async def test_fastapi_serves_what_is_in_the_table_and_nothing_else() -> None:
    async with world() as here:
        own = {
            (method.upper(), path)
            for path, found in here.app._api.openapi()["paths"].items()
            for method in found
        }
        declared = {
            (route.method, route.path.replace(":path}", "}"))
            for route in here.app.routes
            if route.handler is None and not is_page(route.path)
        }
        assert own == declared


@pytest.mark.parametrize("path", ["/open", "/v1/open", "/metrics/open", "/health/open"])
async def test_an_endpoint_that_was_not_declared_is_not_reached(path: str) -> None:
    async with world(api_key="sesame") as here:

        @here.app._api.get(path)
        async def undeclared() -> str:
            return "reached"

        # Routes are tried in order, and the page's mount takes every path.
        here.app._api.router.routes.insert(0, here.app._api.router.routes.pop())
        for headers in ({}, {"authorization": "Bearer sesame"}):
            http = await here.get(path, headers).done()
            assert (http.status, http.json()["error"]["code"]) == (404, "not_found")


def test_nothing_is_declared_without_saying_who_may_call() -> None:
    router: Any = Router()
    with pytest.raises(TypeError):
        router.get("/open")
    with pytest.raises(TypeError):
        router.get("/open", None)
    with pytest.raises(TypeError):
        router.delete("/open", "public")
    assert not router.routes
    with pytest.raises(TypeError):
        Route("POST", "/open")  # type: ignore[call-arg]


def test_nothing_is_declared_twice() -> None:
    with pytest.raises(ValueError, match="/same"):
        RouteTable([Route("GET", "/same", PUBLIC), Route("GET", "/same", METRICS)])


@pytest.mark.parametrize(("method", "path"), [key for key in EXPECTED if key[0] != SOCKET])
async def test_who_may_call(method: str, path: str) -> None:
    """Without a key only what is public; the answer of an endpoint itself does not matter here."""
    async with world(api_key="sesame") as here:
        url = path.replace("{name:path}", "x").replace("{name}", "x.png").replace("{job}", "x")
        http = await Http(here.app, url, b"{}", method).done()
        assert (http.status == 401) == (EXPECTED[method, path] is not PUBLIC)
        http = await Http(here.app, url, b"{}", method, {"authorization": "Bearer sesame"}).done()
        assert http.status not in (401, 405, 421)


async def test_a_key_without_the_right_opens_no_metrics(tmp_path: Any) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(BOUNDED % digest("plain-key"))
    headers = {"authorization": "Bearer plain-key"}
    async with world(tenants_file=file) as here:
        for (_method, path), access in EXPECTED.items():
            if access is METRICS:
                assert (await here.get(path, headers).done()).status == 403
        assert (await here.get("/v1/models", headers).done()).status == 200


# ------------------------------------------------------------------------------------------------- methods and paths
async def answer(here: World, method: str, path: str) -> tuple[int, str, str | None]:
    http = await Http(here.app, path, b"{}", method).done()
    return http.status, http.json()["error"]["code"], http.headers.get("allow")


async def test_unknown_paths_and_methods() -> None:
    async with world() as here:
        for path in (
            "/v1/nothing",
            "/nothing",
            "/v1/messages",
            "/health/nothing",
            "/v1",
            "/style.css/more",
        ):
            for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
                assert await answer(here, method, path) == (404, "not_found", None)
        assert await answer(here, "GET", "/v1/chat/completions") == (
            405,
            "method_not_allowed",
            "POST",
        )
        assert await answer(here, "POST", "/v1/models") == (405, "method_not_allowed", "GET, HEAD")
        assert await answer(here, "POST", "/") == (405, "method_not_allowed", "GET, HEAD")
        assert await answer(here, "PUT", "/v1/images/jobs/x") == (
            405,
            "method_not_allowed",
            "GET, DELETE, HEAD",
        )
        assert await answer(here, "GET", "/v1/images/jobs") == (405, "method_not_allowed", "POST")


async def test_health_is_readiness() -> None:
    async with world() as here:
        short, ready = await here.get("/health").done(), await here.get("/health/ready").done()
        assert (short.status, short.json()) == (ready.status, ready.json())
        assert short.status == 200
        assert (await Http(here.app, "/health", b"", "HEAD").done()).status == 200
        here.service.limits.draining = True
        assert (await here.get("/health").done()).status == 503
