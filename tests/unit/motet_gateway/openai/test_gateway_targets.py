"""Which target of a chain served a request, and pinning one: `motet-served-by`, `motet-target`."""

from __future__ import annotations

from typing import Any

import pytest

from motet_shared.messages import TargetText, Text
from motet_shared.testing import settle
from support.clients.gateway_client import Socket, session, world
from support.services.fake_services import FakeDecode


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDecode, "targets", ("first", "second"))


def moved(request: object) -> list[Text]:
    return [
        TargetText("one ", [1], target="first"),
        TargetText("two", [2], target="second"),
    ]


@pytest.mark.usefixtures("chain")
async def test_a_whole_reply_names_all_targets_in_its_header() -> None:
    async with world() as here:
        here.tokenizer.reply = moved
        answer = await here.ask().done()
        assert answer.headers["motet-served-by"] == "first, second"
        here.tokenizer.reply = lambda request: [Text("plain", [1])]
        assert "motet-served-by" not in (await here.ask().done()).headers


@pytest.mark.usefixtures("chain")
async def test_a_stream_names_the_first_in_its_header_and_the_next_in_a_comment() -> None:
    async with world() as here:
        here.tokenizer.reply, here.tokenizer.pace = moved, 0.05
        answer = await here.ask(stream=True).done()
        assert answer.headers["motet-served-by"] == "first"
        events = b"".join(answer.chunks).split(b"\n\n")
        assert events.count(b": served-by second") == 1
        assert not [event for event in events if event.startswith(b": served-by first")]


@pytest.mark.usefixtures("chain")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_request_may_choose_its_target(path: str) -> None:
    fields: dict[str, Any] = {} if "chat" in path else {"prompt": "hello"}
    async with world() as here:
        await here.ask(path, headers={"motet-target": "second"}, **fields).done()
        await here.ask(path, **fields).done()
        assert [request.target for request in here.tokenizer.requests] == ["second", ""]
        refused = await here.ask(path, headers={"motet-target": "third"}, **fields).done()
        assert refused.status == 400
        assert refused.json()["error"]["param"] == "motet-target"


@pytest.mark.usefixtures("chain")
async def test_a_session_may_choose_its_target() -> None:
    async with world() as here:
        async with session(here.app, headers={"motet-target": "second"}) as socket:
            socket.say("hello")
            socket.send("response.create")
            await socket.until("response.done")
        assert [request.target for request in here.tokenizer.requests] == ["second"]
        refused = Socket(here.app, headers={"motet-target": "third"})
        assert (await refused.expect("error"))["error"]["param"] == "motet-target"
        await refused.leave()


async def test_pictures_are_refused_where_no_instance_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [picture]}]
    monkeypatch.setattr(FakeDecode, "refuses_images", True)
    async with world() as here:
        await settle()
        answer = await here.ask(messages=messages).done()
        error = answer.json()["error"]
        assert (answer.status, error["code"], error["param"]) == (
            400,
            "unsupported_parameter",
            "messages[0].content[0].image_url",
        )
