"""Serve the table of routes as an ASGI application.

Every route is registered with FastAPI, whose router finds it, behind a `Guard`. This module answers
what has no route: a wrong `Host`, an unknown path, a wrong method.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, WebSocketRoute
from starlette.routing import Route as StarletteRoute

from motet_gateway.context import GatewayContext
from motet_gateway.openapi.document import document
from motet_gateway.routes import ROUTES
from motet_shared.errors import MotetError

from .asgi import Receive, Scope, Send, refuse_upgrade
from .exchange import Exchange
from .guard import Guard
from .problems import MethodNotAllowed, NotFound, Problem
from .route import SOCKET, Route, Serving

_MOST_SHOWN = 200  # characters of an unknown path in an error


class App:
    """Check what every request must meet, let FastAPI find its route, and answer what has none.

    Raises ValueError if two routes have the same method and path.
    """

    def __init__(self, service: GatewayContext, routes: tuple[Route, ...] = ROUTES):
        self._service = service
        self.routes = routes
        _check_distinct(self.routes)
        self.api = _Api(service, self.routes)
        self.api.router.default = _unknown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._service.hosts.check(scope)
            if self._service.connections.trusts:
                with self._counted(scope):
                    await self._dispatch(scope, receive, send)
            else:
                await self._dispatch(scope, receive, send)
        except HTTPException:  # the router's, if a known path does not take the method
            await self._refuse(self._wrong_method(scope), scope, receive, send)
        except MotetError as error:
            await self._refuse(error, scope, receive, send)

    def _counted(self, scope: Scope) -> AbstractContextManager[None]:
        """Count a request from a trusted proxy against its client's address."""
        peer = scope.get("client")
        forwarded = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
        return self._service.connections.request(peer[0] if peer else None, forwarded)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        origins = self._service.authenticator.origins
        if scope["type"] == "http" and (allowed := origins.preflight(scope)) is not None:
            await allowed(scope, receive, send)
        else:
            # Its router alone: FastAPI's middleware renders errors, which a guard does here.
            scope["app"] = self.api
            await self.api.router(scope, receive, send)

    def _wrong_method(self, scope: Scope) -> MethodNotAllowed:
        allow = ", ".join(self.api.methods(scope))
        path = scope["path"][:_MOST_SHOWN]
        return MethodNotAllowed(f"{path} takes {allow}, not {scope['method']}", allow)

    async def _refuse(self, error: MotetError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that has no route. A WebSocket is answered before its upgrade."""
        problem = Problem.of(error)
        problem.note(scope["path"])
        if scope["type"] == "websocket":
            await refuse_upgrade(problem, scope, receive, send)
            return
        http = Exchange(scope, receive, send)
        http.headers = lambda: self._service.authenticator.origins.headers(scope)
        await http.fail(problem)


class _Api(FastAPI):
    """Register the table with FastAPI, each route behind its guard."""

    def __init__(self, service: GatewayContext, routes: tuple[Route, ...]):
        # FastAPI's documentation pages load scripts from other hosts.
        super().__init__(
            title="Motet", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
        )
        self.state.service = service
        self._table = routes
        self._served = [_served(service, route) for route in routes]
        self.router.routes.extend(self._served)

    def methods(self, scope: Scope) -> list[str]:
        """Return the methods that the routes of a request's path take, HEAD last."""
        pairs = zip(self._table, self._served, strict=True)
        found = [route.method for route, made in pairs if made.matches(scope)[0] is Match.PARTIAL]
        return [*found, "HEAD"] if "GET" in found else found

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document of the table, instead of FastAPI's own."""
        if self.openapi_schema is None:
            self.openapi_schema = document(self._table)
        return self.openapi_schema


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    method = scope["method"] if scope["type"] == "http" else SOCKET
    path = scope["path"][:_MOST_SHOWN]
    raise NotFound(f"{method} {path}: unknown path; GET /openapi.json lists all paths")


def _served(service: GatewayContext, route: Route) -> BaseRoute:
    """Return a route as Starlette's router takes it."""
    if route.serving is Serving.SOCKET:
        return WebSocketRoute(route.path, Guard(service, route))
    if route.serving is Serving.ENDPOINT:
        made = APIRoute(route.path, route.handler, methods=list(route.methods))
        made.app = Guard(service, route, AsyncExitStackMiddleware(made.app))
        return made
    return StarletteRoute(route.path, Guard(service, route), methods=route.methods)


def _check_distinct(routes: tuple[Route, ...]) -> None:
    seen: set[tuple[str, str]] = set()
    for route in routes:
        if (route.method, route.path) in seen:
            raise ValueError(f"{route.method} {route.path} is declared twice")
        seen.add((route.method, route.path))
