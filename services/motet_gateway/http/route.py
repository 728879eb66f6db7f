"""Define a route: method, path, who may call, handler, and what the OpenAPI document says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .asgi import Scope
from .problems import ErrorFormat

SOCKET = "WEBSOCKET"  # method of the routes that take a WebSocket


class Access(Enum):
    """State who may call a route.

    There is no default: a route cannot be created without an access level.
    """

    PUBLIC = "anyone who reaches the port"
    TENANT = "a tenant; it counts as one of its requests"
    OPERATOR = "a tenant with `metrics = true`"


class Serving(Enum):
    """State how a route is served, and thereby what its handler takes."""

    STREAM = "(service, exchange): raw ASGI, without a layer between the handler and the socket"
    SOCKET = "(service, socket): a WebSocket"
    ENDPOINT = "a FastAPI endpoint: path and query parameters, and dependencies of `context.py`"
    FILE = "an ASGI application that serves one file"


@dataclass(frozen=True, slots=True)
class Route:
    """A route; `path` is a template such as /images/{name}.

    The fields from `summary` on describe it in the OpenAPI document; without a summary it is left
    out. `body` is a struct or the schema of a form; `answer` maps content types to structs (JSON),
    tuples of them, or schemas. `errors` are statuses beyond those that follow from access and
    body, `others` are answers of other statuses that are not errors. Parameters of a path, and
    those of endpoints, are documented without being listed in `parameters`. Errors have OpenAI's
    format unless `error_format` is another, or `choose_error_format` returns another for a request.
    `client_secrets`: they open it, as keys do. `once`: a second execution has another effect or
    answer, so a request is refused whose first one may have run in a gateway that died.
    `repeatable`: takes an `Idempotency-Key`; ids and seeds of its handler come from `kept.draws`.

    Raises TypeError if `access` is not a member of Access.
    """

    method: str
    path: str
    access: Access
    handler: Callable[..., Awaitable[Any]]
    serving: Serving
    summary: str = ""
    tag: str = ""
    body: Any = None
    answer: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    errors: tuple[int, ...] = ()
    parameters: tuple[dict[str, Any], ...] = ()
    others: tuple[tuple[int, Any], ...] = ()
    error_format: ErrorFormat | None = None
    choose_error_format: Callable[[Scope], ErrorFormat | None] | None = None
    client_secrets: bool = False
    once: bool = False
    repeatable: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.access, Access):
            raise TypeError(
                f"{self.method} {self.path}: `access` is {self.access!r}; give a member of Access"
            )

    def error_format_of(self, scope: Scope) -> ErrorFormat | None:
        """Return the format of the errors of one request; None: OpenAI's."""
        if self.choose_error_format is None:
            return self.error_format
        return self.choose_error_format(scope) or self.error_format

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the methods that it takes: HEAD goes with GET."""
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)
