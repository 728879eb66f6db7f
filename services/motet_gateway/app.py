"""The ASGI application: streams and the WebSocket raw, everything small through FastAPI."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from motet_shared import telemetry
from motet_shared.errors import BadRequest, MotetError

from .asgi import ClientGone, Exchange, Receive, Scope, Send, header
from .audio_api import transcriptions, translations
from .chat_api import chat_completions, completions
from .doctor_api import doctor_router
from .embeddings_api import embeddings
from .health import health_router
from .images_api import edits, generations
from .jobs_api import jobs_router, submit
from .models_api import models_router
from .openapi import openapi_router
from .problems import MethodNotAllowed, NotFound, Problem, RateLimited
from .realtime.endpoint import realtime
from .render import error_event
from .service import Service
from .speech_api import speech
from .stack_api import stack_router
from .tenants import Tenant

log = logging.getLogger(__name__)

Endpoint = Callable[[Service, Exchange], Awaitable[None]]

_STREAMS: dict[str, Endpoint] = {
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
_STATIC = Path(__file__).parent / "static"
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class App:
    """Sends each request to its endpoint, and turns every error into OpenAI's shape."""

    def __init__(self, service: Service):
        self._service = service
        self._api = build_api(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        elif (allowed := self._service.door.origins.preflight(scope)) is not None:
            await allowed(scope, receive, send)
        elif (endpoint := _STREAMS.get(scope["path"])) is not None:
            await self._stream(endpoint, Exchange(scope, receive, send))
        else:
            await self._api(scope, receive, send)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/realtime":
            await realtime(self._service, scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 4000})

    async def _stream(self, endpoint: Endpoint, http: Exchange) -> None:
        began = perf_counter()
        token = telemetry.request_id.set(http.request_id)
        try:
            await self._answer(endpoint, http)
        except ClientGone:
            http.status = 499
        finally:
            self._service.metrics.request(http.scope["path"], http.status)
            seconds = round(perf_counter() - began, 4)
            log.info("%s %d", http.scope["path"], http.status, extra={"status": http.status, "seconds": seconds})
            telemetry.request_id.reset(token)

    async def _answer(self, endpoint: Endpoint, http: Exchange) -> None:
        door, tenant = self._service.door, None
        http.told = lambda: door.origins.headers(http.scope)
        try:
            http.tenant = tenant = door.enter(http.scope).tenant
            http.told = lambda: [*tenant.headers(), *door.origins.headers(http.scope)]
            tenant.call()
            if http.scope["method"] != "POST":
                raise MethodNotAllowed(f"{http.scope['path']} takes POST, not {http.scope['method']}")
            with telemetry.span("gateway" + http.scope["path"], parent=_trace(http.scope)):
                await endpoint(self._service, http)
        except ClientGone:
            raise
        except Exception as error:
            problem = Problem.of(error)
            if http.started and not http.sends_events:
                # A sound cannot say what is wrong. The body is left without its end: the connection breaks.
                http.status = problem.status
                log.warning("%s breaks off: %s", http.scope["path"], problem.message)
            elif http.started:
                await http.finish(error_event(problem))
            else:
                await _keep_back(error, tenant)
                await http.fail(problem)


def _trace(scope: Scope) -> Any:
    """The client's trace, if it sent one."""
    parent = header(scope, b"traceparent")
    return telemetry.extract({"traceparent": parent.decode("latin-1")}) if parent else None


def build_api(service: Service) -> FastAPI:
    """Models, health, metrics and the page. The page itself needs no key: it asks its user for one."""
    # FastAPI's own documentation pages fetch scripts from elsewhere, and know nothing of the streams.
    api = FastAPI(title="Motet", openapi_url=None, docs_url=None, redoc_url=None)

    @api.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        path = request.url.path
        if not path.startswith(("/v1/", "/metrics")):
            return await call_next(request)
        door, tenant = service.door, None
        try:
            tenant = request.state.tenant = door.enter(request.scope).tenant
            if path.startswith("/v1/"):
                tenant.call()
            else:
                door.check_metrics(tenant)
            response = await call_next(request)
        except MotetError as error:
            await _keep_back(error, tenant)
            response = _problem_response(error)
        left = tenant.headers() if tenant is not None else ()
        for name, value in (*left, *door.origins.headers(request.scope)):
            response.headers[name.decode()] = value.decode()
        return response

    @api.exception_handler(MotetError)
    async def known(request: Request, error: MotetError) -> Response:
        await _keep_back(error, getattr(request.state, "tenant", None))
        return _problem_response(error)

    @api.exception_handler(RequestValidationError)
    async def wrong_field(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][1:])
        told = f"`{name}`: {first['msg'][:1].lower()}{first['msg'][1:]}, not {first['input']!r}"
        return _problem_response(BadRequest(told, param=name))

    @api.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        kind = MethodNotAllowed if error.status_code == 405 else NotFound
        return _problem_response(kind(f"{request.method} {request.url.path}: {error.detail}"))

    @api.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return _problem_response(error)

    api.include_router(models_router(service))
    api.include_router(openapi_router())
    api.include_router(health_router(service))
    api.include_router(jobs_router(service))
    api.include_router(stack_router(service))
    api.include_router(doctor_router(service))
    api.mount("/", _Page(directory=_STATIC, html=True))
    return api


class _Page(StaticFiles):
    """Static files with headers that forbid every outside request."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_PAGE_HEADERS)
        return response


async def _keep_back(error: Exception, tenant: Tenant | None) -> None:
    """A limit of the tenant is told with a delay to who asks again and again."""
    if tenant is not None and isinstance(error, RateLimited):
        await asyncio.sleep(tenant.refusal_delay())


def _problem_response(error: Exception) -> Response:
    problem = Problem.of(error)
    headers = {name.decode(): value.decode() for name, value in problem.headers()}
    return Response(problem.body(), problem.status, headers, "application/json")
