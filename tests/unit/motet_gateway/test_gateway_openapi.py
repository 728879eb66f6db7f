"""GET /openapi.json: complete, and consistent in itself. `tests/fuzz` holds its promises against the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from motet_gateway.http.routes import SOCKET, Access
from motet_gateway.openai.schema import NO_EFFECT
from motet_gateway.openapi.document import ERRORS, document, routes
from support.gateway_client import world


def described() -> set[tuple[str, str]]:
    return {(method, path) for path, found in document()["paths"].items() for method in found}


async def test_every_endpoint_is_in_it() -> None:
    async with world() as here:
        table = [
            route for route in here.app.routes if route.method != SOCKET and not is_file(route.path)
        ]
        plain = {
            (route.method.lower(), route.path.replace(":path}", "}")): route.access
            for route in table
        }
        assert described() == set(plain)
        public = {(route.method, route.path) for route in routes() if route.public}
        assert public == {key for key, access in plain.items() if access is Access.PUBLIC}
        reply = await here.get("/openapi.json").done()
        assert (reply.status, reply.json()) == (200, document())


def is_file(path: str) -> bool:
    """Whether a path is the page's own."""
    return path == "/" or path.endswith((".js", ".css", ".html", ".svg"))


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
    assert len(set(ids)) == len(ids) == len(routes())


def test_errors_have_one_shape() -> None:
    for path, found in document()["paths"].items():
        for operation in found.values():
            told = {int(status) for status in operation["responses"]} & ERRORS.keys()
            for status in told - ({503} if path in ("/health", "/health/ready") else set()):
                schema = operation["responses"][str(status)]["content"]["application/json"][
                    "schema"
                ]
                assert schema == {"$ref": "#/components/schemas/ErrorBody"}


def test_parameters_that_are_accepted_at_some_values_only_say_which() -> None:
    schemas = document()["components"]["schemas"]
    fields = schemas["ChatBody"]["properties"] | schemas["CompletionBody"]["properties"]
    for name, accepted in NO_EFFECT.items():
        assert fields[name]["enum"] == [None, *accepted], name
