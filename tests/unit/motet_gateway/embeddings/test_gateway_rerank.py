"""/v1/rerank and /v1/score: shapes of Cohere, Jina and vLLM, refusals, limits and charges."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from motet_shared.errors import InternalError
from motet_shared.testing import memory_bus, running, settle
from support.clients.gateway_client import Http, World, world
from support.services.ranking_services import RANKER, WordRanker
from support.stages.tenants_stage import limited, refused

QUERY = "red circle"
DOCUMENTS = ["a blue square", "a red circle", {"text": "a red star", "id": 7}]


@asynccontextmanager
async def ranking(**settings: Any) -> AsyncIterator[tuple[World, WordRanker]]:
    async with world(max_inputs=8, **settings) as here:
        ranker = WordRanker(None, await memory_bus(here.hub, "ranking"))
        async with running(ranker):
            await settle()
            yield here, ranker


async def ask(here: World, path: str, **fields: Any) -> Http:
    return await Http(here.app, path, json.dumps(fields).encode()).done()


async def test_documents_come_back_by_relevance() -> None:
    async with ranking() as (here, _):
        for path in ("/v1/rerank", "/rerank"):
            http = await ask(here, path, model=RANKER, query=QUERY, documents=DOCUMENTS)
            answer = http.json()
            assert (http.status, answer["model"]) == (200, RANKER), http.body
            assert answer["results"] == [
                {"index": 1, "relevance_score": 2.0, "document": {"text": "a red circle"}},
                {"index": 2, "relevance_score": 1.0, "document": {"text": "a red star", "id": 7}},
                {"index": 0, "relevance_score": 0.0, "document": {"text": "a blue square"}},
            ]
            assert answer["usage"] == {"prompt_tokens": 15, "total_tokens": 15}
            assert answer["meta"]["tokens"] == {"input_tokens": 15}
        http = await ask(here, "/v2/rerank", query=QUERY, documents=DOCUMENTS, top_n=1)
        assert http.json()["results"] == [{"index": 1, "relevance_score": 2.0}]
        http = await ask(
            here, "/v2/rerank", query=QUERY, documents=DOCUMENTS, top_n=9, return_documents=True
        )
        assert [one["document"]["text"][:5] for one in http.json()["results"]] == [
            "a red",
            "a red",
            "a blu",
        ]


async def test_fields_of_objects_and_cut_documents() -> None:
    async with ranking() as (here, ranker):
        book = {"title": "Circles", "body": "red all over", "pages": 9}
        http = await ask(
            here, "/v1/rerank", query=QUERY, documents=[book], rank_fields=["title", "body"]
        )
        assert http.json()["results"][0]["document"] == book
        assert ranker.asked is not None
        assert ranker.asked.documents == ["title: Circles\nbody: red all over"]
        long = ["a red circle " * 1000]
        http = await ask(here, "/v1/rerank", query=QUERY, documents=long)
        assert (http.status, http.json()["error"]["code"]) == (400, "context_length_exceeded")
        http = await ask(here, "/v1/rerank", query=QUERY, documents=long, max_tokens_per_doc=2)
        assert (http.status, ranker.asked.max_document) == (200, 2)
        assert len(ranker.asked.documents[0]) <= 2 * 128, "cut before it travels"
        assert http.json()["results"][0]["relevance_score"] == 1.0


async def test_pairs_are_scored_in_order() -> None:
    async with ranking() as (here, _):
        many = ["a star", "a red circle"]
        for path in ("/v1/score", "/score"):
            http = await ask(here, path, model=RANKER, text_1=QUERY, text_2=many)
            assert (http.status, http.json()["object"]) == (200, "list"), http.body
            assert http.json()["data"] == [
                {"index": 0, "object": "score", "score": 0.0},
                {"index": 1, "object": "score", "score": 2.0},
            ]
        http = await ask(here, "/v1/score", text_1=["a star", "blue"], text_2=many)
        assert [one["score"] for one in http.json()["data"]] == [2.0, 0.0]
        assert http.json()["usage"]["total_tokens"] == 4 + 4
        http = await ask(here, "/v1/score", text_1="star", text_2="a star")
        assert [one["score"] for one in http.json()["data"]] == [1.0]


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, 400, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, 400, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, 400, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 9}, 400, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"x": "b"}]}, 400, "documents[0].text"),
        ("/v1/rerank", {"query": "a", "documents": [{"text": 5}]}, 400, "documents[0].text"),
        ("/v1/rerank", {"query": "a", "documents": [5]}, 400, "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, 400, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "colour": 1}, 400, "colour"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "model": "x"}, 404, "model"),
        ("/v1/rerank", {"documents": ["b"]}, 400, "query"),
        ("/v1/rerank", {"query": "a" * 9000, "documents": ["b"]}, 400, "query"),
        ("/v1/score", {"text_1": [], "text_2": ["b"]}, 400, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, 400, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, 400, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, 400, "text_2"),
    ],
)
async def test_what_is_wrong_is_named(
    path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    async with ranking() as (here, ranker):
        http = await ask(here, path, **fields)
        assert (http.status, http.json()["error"]["param"]) == (status, param), http.body
        assert ranker.asked is None


async def test_a_chat_model_is_no_ranker_and_the_list_says_what_is() -> None:
    async with ranking() as (here, _):
        listed = {one["id"]: one for one in (await here.get("/v1/models").done()).json()["data"]}
        assert listed[RANKER]["kind"] == "ranking"
        assert listed[RANKER]["capabilities"] == ["rerank", "score"]
        assert listed[RANKER]["context_length"] == 64
        http = await ask(here, "/v1/embeddings", model=RANKER, input="a")
        assert (http.status, http.json()["error"]["param"]) == (400, "model")


async def test_a_tenant_is_charged_for_what_is_read(tmp_path: Path) -> None:
    async with limited(tmp_path, "tokens_per_minute = 100") as stage:
        ranker = WordRanker(None, await memory_bus(stage.made.hub, "ranking"))
        async with running(ranker):
            await settle()
            http = await stage.done(path="/v1/rerank", model=RANKER, query=QUERY, documents=["a b"])
            used = http.json()["usage"]["total_tokens"]
            assert (used, 100 - stage.tokens()) == (4, 4)
            ranker.error = InternalError("it broke")
            http = await stage.done(
                path="/v1/score", model=RANKER, text_1="a", text_2=["a " * 20, "b"]
            )
            assert (http.status, 100 - stage.tokens()) == (500, 4), "what fails costs nothing"
            many = ["red circle " * 10] * 8
            error = await refused(
                stage.ask(path="/v1/rerank", model=RANKER, query=QUERY, documents=many)
            )
            assert error["type"] == "tokens"
