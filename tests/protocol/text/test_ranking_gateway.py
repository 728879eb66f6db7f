"""/v1/rerank over a real gateway and nats-server, whose permissions a ranking service works under."""

from __future__ import annotations

from pathlib import Path

import httpx

from motet_embedding.config import EmbeddingConfig
from motet_embedding.ranking import RankingService
from support.checkpoints.ranking_checkpoints import cross_encoder
from support.stages.served_gateway import KEY, Served, served

DOCUMENTS = ["ba be", "go ga . ma mi", "a b c d e f g h i j k"]


async def test_documents_are_ranked(tmp_path: Path) -> None:
    path = cross_encoder(tmp_path)
    config = EmbeddingConfig(
        role="ranking", model=str(path), name="ranker", threads=1, metrics_port=-1
    )
    async with (
        served("ranking", lambda bus: RankingService(config, bus)) as (gateway, [service]),
        httpx.AsyncClient(trust_env=False, headers={"Authorization": f"Bearer {KEY}"}) as http,
    ):
        url, query = Served(gateway).url, "ba be di"
        body = {"model": "ranker", "query": query, "documents": DOCUMENTS}
        ranked = await http.post(f"{url}/v1/rerank", json=body, timeout=60)
        assert ranked.status_code == 200, ranked.text
        results = ranked.json()["results"]
        found = {one["index"]: one["relevance_score"] for one in results}
        assert [one["relevance_score"] for one in results] == sorted(found.values(), reverse=True)
        pairs = {"text_1": query, "text_2": DOCUMENTS}
        scored = (await http.post(f"{url}/v1/score", json=pairs, timeout=60)).json()
        assert [one["score"] for one in scored["data"]] == [found[index] for index in range(3)]
        assert scored["usage"] == ranked.json()["usage"]
        long = await http.post(f"{url}/v1/rerank", json=body | {"documents": ["a", "a " * 99]})
        error = long.json()["error"]
        assert (long.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == "documents[1]"
        long = await http.post(f"{url}/v1/score", json=pairs | {"text_2": "a " * 99})
        assert (long.status_code, long.json()["error"]["param"]) == (400, "text_2[0]")
        service.check_integrity()
