"""GET /v1/models in Anthropic's format: which models, in which pages."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import ModelInfo

from motet_gateway.anthropic.models import ModelsQuery, model_info, models_page
from motet_shared.errors import BadRequest
from support.clients.gateway_client import Http, World, world
from support.services.fake_services import MODEL

VERSION = {"anthropic-version": "2023-06-01"}


def described(name: str, kind: str = "chat", **more: Any) -> dict[str, Any]:
    return {"id": name, "created": 86_400, "kind": kind, "context_length": 512, **more}


MODELS = [described("a"), described("voice", "speech"), *map(described, "bcde")]


def ids(**query: Any) -> tuple[str, bool]:
    page = models_page(MODELS, ModelsQuery(**query))
    names = [model["id"] for model in page["data"]]
    assert (page["first_id"], page["last_id"]) == ((names[0], names[-1]) if names else (None, None))
    return "".join(names), page["has_more"]


def test_pages_in_both_directions() -> None:
    assert ids() == ("abcde", False)
    assert ids(limit=2) == ("ab", True)
    assert ids(limit=2, after_id="b") == ("cd", True)
    assert ids(limit=2, after_id="d") == ("e", False)
    assert ids(limit=2, before_id="e") == ("cd", True)
    assert ids(limit=2, before_id="c") == ("ab", False)
    assert ids(before_id="a") == ("", False)
    assert ids(lifecycle=["active", "retired"]) == ("abcde", False)
    assert ids(lifecycle=["retired"]) == ("", False)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"after_id": "voice"}, "after_id"),
        ({"before_id": "z"}, "before_id"),
        ({"after_id": "a", "before_id": "b"}, "before_id"),
    ],
)
def test_cursors_that_are_none_are_named(query: dict[str, str], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ids(**query)
    assert caught.value.param == param


def test_a_model_is_one_of_the_clients_type() -> None:
    made = ModelInfo.model_validate(model_info(described("a")), strict=False)
    assert (made.max_input_tokens, made.created_at.timestamp()) == (512, 86_400)
    starting = model_info({"id": "b", "created": 0, "kind": "chat"})
    assert ModelInfo.model_validate(starting).max_input_tokens is None


async def get(here: World, path: str, query: str = "", **headers: str) -> Http:
    return await Http(here.app, path, b"", "GET", headers, query=query).done()


async def test_the_header_decides_the_format() -> None:
    async with world() as here:
        plain = await get(here, "/v1/models", "limit=0&client_version=1")
        assert plain.json()["object"] == "list"
        theirs = await get(here, "/v1/models", "limit=1&beta=true", **VERSION)
        assert [model["type"] for model in theirs.json()["data"]] == ["model"]
        one = await get(here, f"/v1/models/{MODEL}", **VERSION)
        assert one.json() == theirs.json()["data"][0]
        for path, query, status, kind in (
            ("/v1/models/none", "", 404, "not_found_error"),
            ("/v1/models", "limit=0", 400, "invalid_request_error"),
            ("/v1/models", "first=1", 400, "invalid_request_error"),
        ):
            refused = await get(here, path, query, **VERSION)
            assert (refused.status, refused.json()["type"]) == (status, "error")
            assert refused.json()["error"]["type"] == kind


async def test_a_refused_key_is_told_in_the_clients_format() -> None:
    async with world(api_key="right") as here:
        for path in ("/v1/models", f"/v1/models/{MODEL}"):
            theirs = await get(here, path, **VERSION, **{"x-api-key": "wrong"})
            assert (theirs.status, theirs.json()["type"]) == (401, "error")
            assert theirs.json()["error"]["type"] == "authentication_error"
            plain = await get(here, path)
            assert (plain.status, plain.json()["error"]["code"]) == (401, "invalid_api_key")
