"""GET /openapi.json: complete, and consistent in itself. `tests/fuzz` holds its promises against the server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from motet_gateway.http.route import Access, Serving
from motet_gateway.openai.schema import NO_EFFECT
from motet_gateway.openapi import document as making
from motet_gateway.openapi.document import ERRORS, documented_path
from motet_gateway.routes import ROUTES
from support.clients.gateway_client import world

DESCRIBED = [route for route in ROUTES if route.serving not in (Serving.SOCKET, Serving.FILE)]


@cache
def document() -> Any:
    return making.document(ROUTES)


async def test_every_endpoint_is_in_it() -> None:
    found = {(method, path) for path, methods in document()["paths"].items() for method in methods}
    assert found == {(route.method.lower(), documented_path(route)) for route in DESCRIBED}
    async with world() as here:
        reply = await here.get("/openapi.json").done()
        assert (reply.status, reply.json()) == (200, document())


def test_it_says_who_may_call() -> None:
    for route in DESCRIBED:
        operation = document()["paths"][documented_path(route)][route.method.lower()]
        public = route.access is Access.PUBLIC
        assert (operation["security"] == []) == public
        assert ("401" in operation["responses"]) == (not public)


def test_every_name_in_a_path_is_a_parameter() -> None:
    for path, methods in document()["paths"].items():
        for operation in methods.values():
            named = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path)), path


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        for key, value in part.items():
            if key == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


def test_what_it_refers_to_is_there() -> None:
    names = {f"#/components/schemas/{name}" for name in document()["components"]["schemas"]}
    assert set(references(document())) <= names


def test_operations_have_names_of_their_own() -> None:
    ids = [
        operation["operationId"]
        for found in document()["paths"].values()
        for operation in found.values()
    ]
    assert len(set(ids)) == len(ids) == len(DESCRIBED)


def test_errors_have_one_shape() -> None:
    for path, found in document()["paths"].items():
        for operation in found.values():
            told = {int(status) for status in operation["responses"]} & ERRORS.keys()
            for status in told - ({503} if path in ("/health", "/health/ready") else set()):
                schema = operation["responses"][str(status)]["content"]["application/json"][
                    "schema"
                ]
                own = "MessagesErrorBody" if path.startswith("/v1/messages") else "ErrorBody"
                own = "OllamaError" if path.startswith("/api/") else own
                assert schema == {"$ref": f"#/components/schemas/{own}"}


def test_parameters_that_are_accepted_at_some_values_only_say_which() -> None:
    schemas = document()["components"]["schemas"]
    fields = schemas["ChatBody"]["properties"] | schemas["CompletionBody"]["properties"]
    for name, accepted in NO_EFFECT.items():
        assert fields[name]["enum"] == [None, *accepted], name
