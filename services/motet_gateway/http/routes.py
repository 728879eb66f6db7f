"""Define the route table: method, path, required access and handler of every endpoint."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.routing import compile_path

from .problems import MethodNotAllowed, NotFound

SOCKET = "WEBSOCKET"  # method of the routes that take a WebSocket
_MOST_SHOWN = 200  # characters of an unknown path in an error

Handler = Callable[..., Awaitable[None]]
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class Access(Enum):
    """State who may call a route.

    There is no default: a route cannot be created without an access level.
    """

    PUBLIC = "anyone who reaches the port"
    TENANT = "a tenant; it counts as one of its requests"
    METRICS = "a tenant with `metrics = true`"


@dataclass(frozen=True, slots=True)
class Route:
    """A route; `path` is a template such as /images/{name}.

    `handler` takes (service, exchange), or for SOCKET (service, scope, receive, send). None means
    that FastAPI answers. Raises TypeError if `access` is not a member of Access.
    """

    method: str
    path: str
    access: Access
    handler: Handler | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.access, Access):
            raise TypeError(
                f"{self.method} {self.path}: `access` is {self.access!r}; give a member of Access"
            )


class Router:
    """Collect small endpoints that FastAPI serves, each declared with its access level."""

    def __init__(self) -> None:
        self.fastapi = APIRouter(redirect_slashes=False)
        self.routes: list[Route] = []

    def get(self, path: str, access: Access) -> Callable[[Endpoint], Endpoint]:
        """Declare an endpoint for GET, and thereby for HEAD."""
        return self._declare("GET", path, access)

    def delete(self, path: str, access: Access) -> Callable[[Endpoint], Endpoint]:
        """Declare an endpoint for DELETE."""
        return self._declare("DELETE", path, access)

    def _declare(self, method: str, path: str, access: Access) -> Callable[[Endpoint], Endpoint]:
        self.routes.append(Route(method, path, access))
        return self.fastapi.api_route(path, methods=[method])


class RouteTable:
    """Find the route of a request by method and path.

    Raises ValueError if two routes have the same method and path.
    """

    def __init__(self, routes: Iterable[Route]):
        self._exact: dict[str, dict[str, Route]] = {}
        self._templates: list[tuple[re.Pattern[str], dict[str, Route]]] = []
        for path, methods in _by_path(routes).items():
            if "{" in path:
                self._templates.append((compile_path(path)[0], methods))
            else:
                self._exact[path] = methods

    def __iter__(self) -> Iterator[Route]:
        for methods in (*self._exact.values(), *(methods for _, methods in self._templates)):
            yield from methods.values()

    def find(self, method: str, path: str) -> Route:
        """Return the route of a request; HEAD falls back to GET.

        Raises NotFound for an unknown path, MethodNotAllowed for a known path with another method.
        """
        methods = self._exact.get(path) or self._match(path)
        route = methods.get(method) or (methods.get("GET") if method == "HEAD" else None)
        if route is not None:
            return route
        allowed = [name for name in methods if name != SOCKET]
        if method == SOCKET or not allowed:
            raise NotFound(
                f"{method} {path[:_MOST_SHOWN]}: unknown path; GET /openapi.json lists all paths"
            )
        allow = ", ".join([*allowed, "HEAD"] if "GET" in allowed else allowed)
        raise MethodNotAllowed(f"{path[:_MOST_SHOWN]} takes {allow}, not {method}", allow)

    def _match(self, path: str) -> dict[str, Route]:
        return next((methods for pattern, methods in self._templates if pattern.match(path)), {})


def _by_path(routes: Iterable[Route]) -> dict[str, dict[str, Route]]:
    found: dict[str, dict[str, Route]] = {}
    for route in routes:
        methods = found.setdefault(route.path, {})
        if route.method in methods:
            raise ValueError(f"{route.method} {route.path} is declared twice")
        methods[route.method] = route
    return found
