"""What the OpenAPI document allows and forbids, sent to the server: no 500, no hang, and answers as the document says.

`MOTET_FUZZ_EXAMPLES` says how many requests of each kind per endpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from fuzz.served_world import ServedWorld, served_world
from motet_gateway.http.route import Route
from motet_gateway.openapi.document import FORM, document, documented_path
from motet_gateway.routes import ROUTES
from support.services.drawing_services import BRUSH, VECTORS
from support.services.fake_services import MODEL
from support.services.ranking_services import RANKER
from support.services.voice_services import ASR_MODEL, VOICE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    # The server is a thread of this process, and hypothesis takes its use of `random` for ours.
    pytest.mark.filterwarnings(
        "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"
    ),
]

EXAMPLES = int(os.environ.get("MOTET_FUZZ_EXAMPLES", "5"))
PATIENCE = 20.0  # seconds for an answer
# A server whose services are all there has no reason for any other.
MAY_FAIL = {503}
SERVED = {"text": MODEL, "responses": MODEL, "messages": MODEL, "sound": ASR_MODEL, "images": BRUSH}
SERVED |= {"videos": BRUSH}
RANKED = ("/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score")
SERVED |= {"ollama": MODEL, "realtime": MODEL}
OWN = {"/v1/embeddings": VECTORS, "/v1/audio/speech": VOICE, **dict.fromkeys(RANKED, RANKER)}
OWN |= dict.fromkeys(("/api/embed", "/api/embeddings"), VECTORS)
DOCUMENT = document(ROUTES)


def queried(route: Route) -> bool:
    """Whether it has parameters in its query."""
    operation = DOCUMENT["paths"][documented_path(route)][route.method.lower()]
    return any(one["in"] == "query" for one in operation.get("parameters", ()))


def form_texts(route: Route) -> set[str]:
    """Return the fields of its form that are texts, in which a number is spelled as its digits."""
    operation = DOCUMENT["paths"][documented_path(route)][route.method.lower()]
    content = operation.get("requestBody", {}).get("content", {})
    fields = content.get(FORM, {}).get("schema", {}).get("properties", {})
    return {name for name, schema in fields.items() if schema.get("type") == "string"}


# The document allows, or forbids; what takes nothing but a name in its path forbids nothing.
CASES = [
    pytest.param(route, mode, id=f"{route.method} {route.path} {mode}")
    for route in ROUTES
    if route.summary
    for mode in ("positive", "negative")
    if mode == "positive" or route.body is not None or queried(route)
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedWorld]:
    with served_world(tmp_path_factory.mktemp("store")) as world:
        yield world


@pytest.fixture(scope="module")
def http() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.trust_env = False
        yield session


@pytest.fixture(scope="module")
def api(world: ServedWorld) -> Any:
    import schemathesis  # costs half a second, which most runs of tests need not wait

    schema = schemathesis.openapi.from_url(f"{world.url}/openapi.json")
    schema.config.update(base_url=world.url)
    return schema


@pytest.mark.parametrize(("route", "mode"), CASES)
def test_no_request_breaks_the_server(
    route: Route, mode: str, api: Any, http: requests.Session, world: ServedWorld
) -> None:
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi import checks

    conforms = [
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.negative_data_rejection,
    ]
    cases = api[documented_path(route)][route.method.upper()].as_strategy(GenerationMode(mode))

    texts = form_texts(route)

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(cases, st.integers(0, 3))
    def send(case: Any, known: int) -> None:
        if isinstance(case.body, dict):  # the server cannot tell 1 from "1" in a form
            assume(not any(isinstance(case.body.get(name), int | float) for name in texts))
        named = case.body.get("model") if isinstance(case.body, dict) else None
        if known and named and isinstance(named, str):  # another type is a violation to keep
            case.body["model"] = OWN.get(route.path) or SERVED.get(route.tag, MODEL)
        response = case.call(session=http, timeout=PATIENCE)
        assert response.status_code < 500 or response.status_code in MAY_FAIL, (
            case.as_curl_command()
        )
        case.validate_response(response, checks=conforms)

    send()
    world.check()
