"""Serve the ASGI application: streams and WebSocket directly, small endpoints through FastAPI."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from motet_gateway.audio.speech import speech
from motet_gateway.audio.transcriptions import transcriptions, translations
from motet_gateway.context import GatewayContext
from motet_gateway.images.endpoints import edits, generations
from motet_gateway.images.jobs_endpoints import jobs_router, submit
from motet_gateway.openai.chat import chat_completions, completions
from motet_gateway.openai.embeddings import embeddings
from motet_gateway.openai.models import models_router
from motet_gateway.openai.render import error_event
from motet_gateway.openapi.document import openapi_router
from motet_gateway.operations.doctor import doctor_router
from motet_gateway.operations.health import health_router
from motet_gateway.operations.stack import stack_router
from motet_gateway.realtime.endpoint import realtime
from motet_gateway.tenancy.auth import Authenticator
from motet_gateway.tenancy.tenant import Tenant
from motet_shared.errors import BadRequest, MotetError
from motet_shared.process import telemetry

from .asgi import ClientGone, Headers, Receive, Scope, Send, header, refuse_upgrade
from .exchange import Exchange
from .problems import NotFound, Problem, RateLimited
from .routes import SOCKET, Access, Handler, Route, Router, RouteTable

log = logging.getLogger(__name__)

_STREAMS: dict[str, Handler] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/audio/transcriptions": transcriptions,
    "/v1/audio/translations": translations,
    "/v1/audio/speech": speech,
    "/v1/embeddings": embeddings,
    "/v1/images/generations": generations,
    "/v1/images/edits": edits,
    "/v1/images/jobs": submit,
}
_STATIC = Path(__file__).parents[1] / "web" / "static"
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class App:
    """Dispatch each request to its endpoint and render every error in OpenAI's format."""

    def __init__(self, service: GatewayContext):
        self._service = service
        routers = [openapi_router(), *(make(service) for make in _ROUTERS)]
        self._api = build_api(routers)
        small = (route for router in routers for route in router.routes)
        self.routes = RouteTable([*_raw_routes(), *small, *_page_routes()])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._service.hosts.check(scope)
            if self._service.connections.trusts:
                with self._counted(scope):
                    await self._dispatch(scope, receive, send)
            else:
                await self._dispatch(scope, receive, send)
        except MotetError as error:
            await self._refuse(error, scope, receive, send)

    def _counted(self, scope: Scope) -> AbstractContextManager[None]:
        """Count a request from a trusted proxy against its client's address."""
        peer = scope.get("client")
        forwarded = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
        return self._service.connections.request(peer[0] if peer else None, forwarded)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = scope["type"] == "websocket"
        if (
            not socket
            and (allowed := self._service.authenticator.origins.preflight(scope)) is not None
        ):
            await allowed(scope, receive, send)
            return
        route = self.routes.find(SOCKET if socket else scope["method"], scope["path"])
        if route.handler is None:
            # HEAD is answered like GET; the server omits the body.
            await self._small(route, {**scope, "method": route.method}, receive, send)
        elif socket:
            await route.handler(self._service, scope, receive, send)
        else:
            await self._stream(route, Exchange(scope, receive, send))

    async def _refuse(self, error: MotetError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that fails before it reaches an endpoint.

        A WebSocket is answered before its upgrade.
        """
        problem = Problem.of(error)
        problem.note(scope["path"])
        if scope["type"] == "websocket":
            await refuse_upgrade(problem, scope, receive, send)
            return
        http = Exchange(scope, receive, send)
        http.told = lambda: self._service.authenticator.origins.headers(scope)
        await http.fail(problem)

    async def _small(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate the request, check its access and let FastAPI answer it."""
        door, tenant = self._service.authenticator, None
        if route.access is Access.PUBLIC:
            await self._api(scope, receive, send)
            return
        try:
            tenant = door.authenticate(scope).tenant
            door.authorize(tenant, route.access)
        except MotetError as error:
            await _delay_refusal(error, tenant)
            http = Exchange(scope, receive, send)
            http.told = lambda: _told(door, tenant, scope)
            problem = Problem.of(error)
            problem.note(route.path)
            await http.fail(problem)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        await self._api(scope, receive, _adding(send, lambda: _told(door, tenant, scope)))

    async def _stream(self, route: Route, http: Exchange) -> None:
        began = perf_counter()
        token = telemetry.request_id.set(http.request_id)
        try:
            await self._answer(route, http)
        except ClientGone:
            http.status = 499
        finally:
            self._service.metrics.request(http.scope["path"], http.status)
            seconds = round(perf_counter() - began, 4)
            extra = {"status": http.status, "seconds": seconds}
            if names := http.ignored:
                log.info("%s ignores %s", http.scope["path"], names, extra={"ignored": names})
            log.info("%s %d", http.scope["path"], http.status, extra=extra)
            telemetry.request_id.reset(token)

    async def _answer(self, route: Route, http: Exchange) -> None:
        door, tenant = self._service.authenticator, None
        http.strict = self._service.config.strict
        http.told = lambda: door.origins.headers(http.scope)
        try:
            http.tenant = tenant = door.authenticate(http.scope).tenant
            http.told = lambda: _told(door, tenant, http.scope)
            door.authorize(tenant, route.access)
            with telemetry.span("gateway" + route.path, parent=_trace(http.scope)):
                await route.handler(self._service, http)  # type: ignore[misc]
        except ClientGone:
            raise
        except Exception as error:
            problem = Problem.of(error)
            problem.note(http.scope["path"])
            if http.started and not http.sends_events:
                # An audio body cannot carry an error: left unterminated, it breaks the connection.
                http.status = problem.status
                log.warning("%s aborted after its start: %s", http.scope["path"], problem.message)
            elif http.started:
                await http.finish(error_event(problem))
            else:
                await _delay_refusal(error, tenant)
                await http.fail(problem)


def _trace(scope: Scope) -> Any:
    """Return the client's trace context, or None if the request carries none."""
    parent = header(scope, b"traceparent")
    return telemetry.extract({"traceparent": parent.decode("latin-1")}) if parent else None


def _told(door: Authenticator, tenant: Tenant | None, scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the headers of every response to a tenant: remaining limits and CORS."""
    return [*(tenant.headers() if tenant is not None else ()), *door.origins.headers(scope)]


def _adding(send: Send, told: Callable[[], Headers]) -> Send:
    """Return `send` with headers added to the response, evaluated when the response starts."""

    async def send_more(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *told()]
        await send(message)

    return send_more


# ------------------------------------------------------------------------------------------------ the small endpoints
_ROUTERS = (models_router, health_router, jobs_router, stack_router, doctor_router)


def _raw_routes() -> list[Route]:
    streams = [Route("POST", path, Access.TENANT, handler) for path, handler in _STREAMS.items()]
    return [*streams, Route(SOCKET, "/v1/realtime", Access.TENANT, realtime)]


def _page_routes() -> list[Route]:
    """Return the routes of the page's files.

    They are public: the page itself asks its user for a key.
    """
    files = [
        str(path.relative_to(_STATIC)) for path in sorted(_STATIC.rglob("*")) if path.is_file()
    ]
    return [Route("GET", f"/{name}", Access.PUBLIC) for name in ("", *files)]


def build_api(routers: Iterable[Router]) -> FastAPI:
    """Build the FastAPI application of the small endpoints and the page.

    It does no authentication: `App` passes it only requests that are allowed.
    """
    # FastAPI's documentation pages load scripts from other hosts and omit the streaming routes.
    api = FastAPI(
        title="Motet", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )

    @api.exception_handler(MotetError)
    async def known(request: Request, error: MotetError) -> Response:
        await _delay_refusal(error, getattr(request.state, "tenant", None))
        return _problem_response(error, request.url.path)

    @api.exception_handler(RequestValidationError)
    async def wrong_field(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][1:])
        told = f"`{name}`: {first['msg'][:1].lower()}{first['msg'][1:]}, not {first['input']!r}"
        return _problem_response(BadRequest(told, param=name), request.url.path)

    @api.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return _problem_response(
            NotFound(f"{request.method} {request.url.path}: {error.detail}"), request.url.path
        )

    @api.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return _problem_response(error, request.url.path)

    for router in routers:
        api.include_router(router.fastapi)
    api.mount("/", _Page(directory=_STATIC, html=True))
    return api


class _Page(StaticFiles):
    """Serve static files with headers that forbid every request to other hosts."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_PAGE_HEADERS)
        return response


async def _delay_refusal(error: Exception, tenant: Tenant | None) -> None:
    """Delay the refusal of a rate-limited tenant that retries too often."""
    if tenant is not None and isinstance(error, RateLimited):
        await asyncio.sleep(tenant.refusal_delay())


def _problem_response(error: Exception, path: str) -> Response:
    problem = Problem.of(error)
    problem.note(path)
    headers = {name.decode(): value.decode() for name, value in problem.headers()}
    return Response(problem.body(), problem.status, headers, "application/json")
