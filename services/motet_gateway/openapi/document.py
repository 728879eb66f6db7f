"""Make the OpenAPI document of the table of routes, and serve it as GET /openapi.json.

The schemas of requests are generated from the structs that validate them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from fastapi.routing import APIRoute

from motet_gateway.http.route import Access, Route, Serving
from motet_gateway.openai.schema import NO_EFFECT
from motet_shared import __version__

from . import answers as answers
from .forms import Schema

_REF = "#/components/schemas/{name}"
JSON, FORM = "application/json", "multipart/form-data"
_TEXT: Schema = {"type": "string"}
_ABOUT = """\
OpenAI's API, with extensions that are named as such. Each parameter is implemented, accepted where it asks for
nothing, or refused by name; the header `motet-ignored` names those that were ignored because they cannot change the
answer (`--strict` refuses them). Conversations have a WebSocket at `/v1/realtime`, texts that are spoken while they
are written one at `/v1/audio/speech/stream`; this document cannot describe them. A stream is server-sent events; one
that breaks after its start ends with `data: {"error": …}`, without `[DONE]`.\
"""

ERRORS = {
    400: "A parameter is wrong: `param` names it.",
    401: "No key, or one that is not accepted.",
    403: "The site or the tenant may not ask for this.",
    404: "There is no such model, or no such thing.",
    405: "The path takes another method.",
    408: "The head or the body of the request came too slowly.",
    413: "The body is too large.",
    421: "The `Host` is no name of this server (--allowed-hosts).",
    429: "Too many at a time, or a limit of the tenant is reached; `Retry-After` says when to come back.",
    431: "The head of the request is too large.",
    499: "It was cancelled.",
    503: "No instance can answer now, or the server is stopping; the request may be repeated.",
    504: "It took longer than the server allows.",
}
_UNTYPED = ("InputMessage",)  # structs whose `type` may be left out, unlike other tags
_ANYWHERE = (408, 421, 431)
_WORK = (400, 404, 405, 413, 429, 499, 503, 504)
_BY_ACCESS: dict[Access, tuple[int, ...]] = {
    Access.PUBLIC: (),
    Access.TENANT: (401, 403, 429),
    Access.OPERATOR: (401, 403),
}


# -------------------------------------------------------------------------------------------------------- the document
def document(routes: Iterable[Route]) -> Schema:
    """Return the OpenAPI 3.1 document of all routes that have a summary."""
    structs = _Structs()
    paths: Schema = {}
    described = [route for route in routes if route.summary]
    known = {documented_path(route) for route in described}
    for route in described:
        path = documented_path(route)
        made = structs.operation(route) | {"operationId": _name(route, f"/v1{path}" in known)}
        paths.setdefault(path, {})[route.method.lower()] = made
    return {
        "openapi": "3.1.0",
        "info": {"title": "Motet", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": structs.components(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


class _Structs:
    """Collect the schemas of the structs that a document refers to."""

    def __init__(self) -> None:
        self._found: list[Any] = []

    def operation(self, route: Route) -> Schema:
        made: Schema = {"summary": route.summary, "tags": [route.tag]}
        if parameters := _parameters(route):
            made["parameters"] = parameters
        if route.body is not None:
            kind = FORM if isinstance(route.body, dict) else JSON
            made["requestBody"] = {
                "required": True,
                "content": {kind: {"schema": self._schema(route.body)}},
            }
        made["responses"] = self._responses(route)
        # A server on loopback may require no key.
        made["security"] = [] if route.access is Access.PUBLIC else [{}, {"key": []}]
        return made

    def _responses(self, route: Route) -> Schema:
        content = {kind: {"schema": self._schema(shape)} for kind, shape in route.answer.items()}
        found: Schema = {str(route.status): {"description": route.summary, "content": content}}
        for status, shape in route.others:
            found[str(status)] = self._json("Not now.", shape)
        for status in errors_of(route):
            found[str(status)] = self._json(ERRORS[status], shape_of_errors(route))
        return found

    def _json(self, description: str, shape: Any) -> Schema:
        return {"description": description, "content": {JSON: {"schema": self._schema(shape)}}}

    def _schema(self, shape: Any) -> Schema:
        """Return a reference to a struct, `anyOf` for a tuple, or a given schema unchanged."""
        if isinstance(shape, dict):
            return shape
        if isinstance(shape, tuple):
            return {"anyOf": [self._schema(one) for one in shape]}
        self._found.append(shape)
        (schema,), _ = msgspec.json.schema_components([shape], ref_template=_REF)
        return schema

    def components(self) -> Schema:
        _, components = msgspec.json.schema_components(self._found, ref_template=_REF)
        for name, schema in components.items():
            _narrow(schema)
            if name in _UNTYPED:
                schema["required"].remove("type")
        return dict(components)


def _narrow(schema: Schema) -> None:
    """Restrict parameters of NO_EFFECT to the values at which they are accepted."""
    for name, field in schema.get("properties", {}).items():
        if field == {"default": None} and name in NO_EFFECT:
            field["enum"] = [None, *NO_EFFECT[name]]


def _name(route: Route, has_twin: bool) -> str:
    """Return a name of the operation: its method and path, without the usual `/v1`.

    has_twin: the same path exists below `/v1`, too.
    """
    path = documented_path(route).replace("{", "").replace("}", "")
    words = [word for word in path.split("/") if word not in ("", "v1")]
    if has_twin:
        words.append("unversioned")
    return "_".join([route.method.lower(), *(word.replace(".", "_") for word in words)])


def documented_path(route: Route) -> str:
    """Return the template of a path without Starlette's convertors: {name:path} is {name}."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", route.path)


def errors_of(route: Route) -> list[int]:
    """Return the statuses of all errors that a route may answer with."""
    work = _WORK if route.body is not None else ()
    return sorted({*_ANYWHERE, *_BY_ACCESS[route.access], *work, *route.errors})


def shape_of_errors(route: Route) -> type[msgspec.Struct]:
    """Return the struct of the errors that a route answers with."""
    return answers.ErrorBody if route.error_format is None else route.error_format.shape


def _parameters(route: Route) -> list[Schema]:
    """Return the parameters of path and query: of an endpoint, as FastAPI describes them."""
    if route.serving is not Serving.ENDPOINT:
        names = re.findall(r"{(\w+)", route.path)
        in_path = [{"name": n, "in": "path", "required": True, "schema": _TEXT} for n in names]
        return [*in_path, *route.parameters]
    made = APIRoute(route.path, route.handler, methods=[route.method])
    described = get_openapi(title="", version="", routes=[made])["paths"][made.path_format]
    return [*described[route.method.lower()].get("parameters", ()), *route.parameters]


def query_parameters(cls: type[msgspec.Struct]) -> tuple[Schema, ...]:
    """Return the parameters of a query that is decoded as a struct."""
    (_, components) = msgspec.json.schema_components([cls], ref_template=_REF)
    fields = components[cls.__name__]["properties"]
    return tuple({"name": name, "in": "query", "schema": field} for name, field in fields.items())


async def openapi(request: Request) -> Response:
    """Answer GET /openapi.json."""
    return Response(msgspec.json.encode(request.app.openapi()), media_type=JSON)
