"""What one tenant stores with /v1/responses is out of reach for another, and what is stored is bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.clients.responses_client import Responses, problem, responses
from support.services.fake_services import words
from support.stages.tenants_stage import OTHER, bearer, document

THEIRS = bearer(OTHER)


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Responses]:
    file = tmp_path / "tenants.toml"
    file.write_text(document(""))
    async with responses(tenants_file=file, max_body=64 << 10) as made:
        yield made


async def test_another_tenant_reaches_nothing_by_id(here: Responses) -> None:
    mine = await here.create("the password is swordfish", headers=bearer())
    before = dict(here.documents.kept)
    output = mine["output"][0]["id"]
    inputs = output.replace("_0", "_i0")
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        http = await here.get(mine["id"] + path, method, **THEIRS)
        assert problem(http)[:2] == (404, "not_found")
        assert b"swordfish" not in http.body
    assert (await here.refused(previous_response_id=mine["id"], headers=THEIRS))[0] == 404
    for item in (output, inputs, mine["id"]):
        reference = {"type": "item_reference", "id": item}
        assert (await here.refused([reference], headers=THEIRS))[0] == 400
    assert here.documents.kept == before


@pytest.mark.parametrize(
    "name",
    [
        "acme.{id}",
        "../acme/{id}",
        "..%2Facme%2F{id}",
        "{id}.input",
        "{id}.stop",
        "{id}.log.0",
        "{id}/",
        "{id}\n",
        "*",
        ">",
        "$KV.motet_responses_acme.{id}",
        "\x00",
        "resp_" + "0" * 50_000,
    ],
)
async def test_names_that_are_no_ids_name_nothing(here: Responses, name: str) -> None:
    mine = await here.create(headers=bearer())
    name = name.format(id=mine["id"])
    for headers in (bearer(), THEIRS):
        for method in ("GET", "DELETE"):
            assert (await here.get(name, method, **headers)).status in (400, 404)
        refused = await here.refused(previous_response_id=name, headers=headers)
        assert refused[:2] == (404, "previous_response_not_found")
    assert (await here.get(mine["id"], **bearer())).status == 200


async def test_a_conversation_is_bounded(here: Responses) -> None:
    """A chain of large inputs is refused before it is put together, or cut where that was asked for."""
    here.says(*words("ok"))
    last: dict[str, Any] = await here.create("x" * 30_000, headers=bearer())
    for _ in range(2):
        last = await here.create(
            "x" * 30_000, previous_response_id=last["id"], headers=bearer(), truncation="auto"
        )
    assert await here.refused("y", previous_response_id=last["id"], headers=bearer()) == (
        400,
        "context_length_exceeded",
        "previous_response_id",
    )
    asked = len(here.requests)
    await here.create("y", previous_response_id=last["id"], headers=bearer(), truncation="auto")
    assert len(here.requests) == asked + 1
    sizes = [len(str(message["content"])) for message in here.requests[-1].messages]
    assert sum(sizes) < 64 << 10
