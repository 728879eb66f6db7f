"""What clients see of a model that is loaded on demand: lists, comments, refusals and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from motet_gateway.http.problems import WrongModelKind
from motet_gateway.openai.aliases import VIDEO, model_of
from motet_gateway.operations import loading
from motet_shared.messages import Chat, Complete, Offer, Text
from motet_shared.testing import memory_buses, settle
from motet_shared.wire.bus import Bus, wanted_key
from support.clients.gateway_client import World, world
from support.services.fake_services import MODEL, FakeDecode, words


@asynccontextmanager
async def offering(*offers: Offer) -> AsyncIterator[tuple[World, Bus]]:
    """Run a gateway with a tokenizer, no decode, and a supervisor that offers these models."""
    async with world() as here, memory_buses("operator", hub=here.hub) as (supervisor,):
        await here.buses[2].close()
        supervisor.offers = lambda: list(offers)
        supervisor.set_state("ready")
        await settle()
        yield here, supervisor


def waiting(supervisor: Bus, role: str = "decode", model: str = MODEL) -> float:
    beats = supervisor.directory.instances("gateway")
    return sum(beat.load.get(wanted_key(role, model), 0.0) for beat in beats)


async def test_the_list_tells_what_a_model_can_do_and_where_it_stands() -> None:
    offer = Offer(role="decode", model=MODEL, stage="loading", share=0.25, seconds=3.0)
    voice = Offer(role="tts", model="voice")
    async with offering(offer, voice) as (here, _):
        models = (await here.get("/v1/models").done()).json()["data"]
        chat, speech = models
        assert (chat["id"], chat["status"], chat["kind"]) == (MODEL, "loading", "chat")
        assert chat["loading"] == {"stage": "loading", "share": 0.25, "seconds": 3.0}
        assert chat["capabilities"] == ["completion", "chat", "tools", "vision"]
        assert (speech["id"], speech["status"]) == ("voice", "unloaded")
        assert (await here.get("/health/ready").done()).status == 200


@pytest.mark.parametrize(("prefer", "status"), [("wait=2", 503), ("respond-async, wait=9", 200)])
async def test_a_client_may_refuse_to_wait(prefer: str, status: int) -> None:
    offer = Offer(role="decode", model=MODEL, stage="absent", seconds=4.2)
    async with offering(offer) as (here, supervisor):
        reply = await here.ask(headers={"prefer": prefer}).done()
        assert reply.status == status
        if status == 503:
            error = reply.json()["error"]
            assert (error["code"], error["param"]) == ("model_loading", "model")
            assert reply.headers["retry-after"] == "5"
            await settle()
            assert waiting(supervisor) == 1.0  # it is loaded all the same


async def test_a_stream_begins_with_comments_until_its_first_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "NOTICE_EVERY", 0.02)
    offer = Offer(role="decode", model=MODEL, stage="loading", share=0.5, seconds=1.0)

    def slowly(request: Chat | Complete) -> list[Text]:
        return words("late words")

    async with offering(offer) as (here, _):
        here.tokenizer.reply = slowly
        here.tokenizer.pace = 0.1
        reply = await here.ask(stream=True).done()
        comments, _, rest = reply.body.decode().partition("data: ")
        found = [json.loads(line[len(": loading ") :]) for line in comments.split("\n\n") if line]
        assert found
        assert found[0] == {"stage": "loading", "share": 0.5, "seconds": 1.0}
        assert ": loading" not in rest
        assert reply.text() == "late words"


async def test_a_model_that_is_ready_has_no_comments() -> None:
    offer = Offer(role="decode", model=MODEL, stage="ready", share=1.0)
    async with offering(offer) as (here, _), memory_buses("decode", hub=here.hub) as (bus,):
        await FakeDecode(None, bus).start()
        await settle()
        reply = await here.ask(stream=True, headers={"prefer": "wait=0"}).done()
        assert reply.status == 200
        assert reply.body.startswith(b"data: ")


async def test_requests_for_other_roles_wait_and_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Offer(role="embedding", model="vectors", stage="absent", seconds=1.0)
    async with offering(offer) as (here, supervisor):
        asked = here.ask("/v1/embeddings", model="vectors", input="a")
        await settle()
        assert waiting(supervisor, "embedding", "vectors") == 1.0
        asked.leave()
        await asked.done()
        here.service.bus.heartbeat()
        await settle()
        assert waiting(supervisor, "embedding", "vectors") == 0.0


async def test_a_model_that_cannot_be_loaded_is_an_error_at_once() -> None:
    offer = Offer(role="embedding", model="vectors", stage="failed", problem="no such file")
    async with offering(offer) as (here, supervisor):
        reply = await here.ask("/v1/embeddings", model="vectors", input="a").done()
        error = reply.json()["error"]
        assert (reply.status, error["code"], error["param"]) == (503, "model_load_failed", "model")
        supervisor.offers = list
        supervisor.heartbeat()
        await settle()
        reply = await here.ask("/v1/embeddings", model="vectors", input="a").done()
        assert reply.json()["error"]["code"] == "unavailable"  # no embedding service at all


async def test_a_model_of_videos_is_known_before_it_is_loaded() -> None:
    film = Offer(role="diffusion", model="film", videos=True)
    async with offering(Offer(role="diffusion", model="brush"), film) as (here, _):
        models = (await here.get("/v1/models").done()).json()["data"]
        assert {model["id"]: model["kind"] for model in models} == {
            "brush": "image",
            "film": "video",
        }
        directory = here.service.bus.directory
        assert (model_of(directory, VIDEO, ""), model_of(directory, VIDEO, "sora-2")) == (
            "film",
            "film",
        )
        assert model_of(directory, "diffusion", "") == "brush"
        for role, other in ((VIDEO, "brush"), ("diffusion", "film"), ("diffusion", "sora-2")):
            with pytest.raises(WrongModelKind):
                model_of(directory, role, other)


async def test_only_a_supervisor_offers_models() -> None:
    async with world() as here:
        here.buses[1].offers = lambda: [Offer(role="tts", model="voice")]
        here.buses[1].heartbeat()
        await settle()
        assert here.service.bus.directory.presence.offers("tts") == []
