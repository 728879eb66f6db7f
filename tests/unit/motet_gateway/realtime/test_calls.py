"""POST /v1/realtime/calls: who may call and what is refused, before a connection is made."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from support.clients.gateway_client import Http, Socket, World, world
from support.clients.offers import AUDIO, offer
from support.services.fake_services import MODEL

PATH = "/v1/realtime/calls"
KEY, OTHER = "sesame", "open"


@pytest_asyncio.fixture
async def here() -> AsyncIterator[World]:
    async with world(api_key=f"{KEY}\n{OTHER}", max_calls=2) as made:
        yield made
        for call in list(made.service.calls.values()):
            await call.end()
        assert len(made.service.sessions) == 0


async def call(
    here: World,
    body: bytes = offer().encode(),  # a constant
    kind: str = "application/sdp",
    key: str = KEY,
    query: str = f"model={MODEL}",
) -> Http:
    headers = {"content-type": kind, "authorization": f"Bearer {key}"}
    return await Http(here.app, PATH, body, headers=headers, query=query).done()


def form(**fields: str) -> tuple[bytes, str]:
    parts = [
        f'--x\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    ]
    return ("".join(parts) + "--x--\r\n").encode(), "multipart/form-data; boundary=x"


async def secret_of(here: World) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"session": {"type": "realtime", "model": MODEL, "instructions": "be brief"}}
    return (await here.post("/v1/realtime/client_secrets", body, headers)).json()


def error(reply: Http) -> tuple[int, str, str | None]:
    found = reply.json()["error"]
    return reply.status, found["code"], found["param"]


async def test_an_offer_is_answered_on_loopback_alone(here: World) -> None:
    reply = await call(here)
    assert (reply.status, reply.headers["content-type"]) == (201, "application/sdp")
    (call_id,) = here.service.calls
    assert reply.headers["location"] == f"{PATH}/{call_id}"
    lines = reply.body.decode().splitlines()
    listens = [line.split()[4] for line in lines if line.startswith("a=candidate:")]
    assert set(listens) == {"127.0.0.1"}
    assert {"a=rtpmap:111 opus/48000/2", "a=fmtp:111 minptime=10;useinbandfec=1"} <= set(lines)
    assert not any("PCMU" in line for line in lines)


async def test_a_form_has_the_session(here: World) -> None:
    session = {"type": "realtime", "model": MODEL, "instructions": "be brief"}
    reply = await call(here, *form(sdp=offer(), session=json.dumps(session)), query="")
    assert reply.status == 201
    (made,) = here.service.calls.values()
    assert made.session.settings.instructions == "be brief"


@pytest.mark.parametrize(
    ("body", "kind", "query", "expected"),
    [
        (b"v=0", "application/sdp", "", (400, "unsupported_parameter", "sdp")),
        (b"\xff", "application/sdp", "", (400, "invalid_request", "sdp")),
        (b"v=0" * 30_000, "application/sdp", "", (413, "payload_too_large", None)),
        (b"{}", "application/json", "", (400, "invalid_request", "sdp")),
        (*form(session="{}"), "", (400, "invalid_request", "sdp")),
        (*form(sdp=offer(), more="x"), "", (400, "invalid_request", "more")),
        (*form(sdp=offer(), session='{"voice": 1}'), "", (400, "unsupported_parameter", "voice")),
        (offer().encode(), "application/sdp", "model=gpt-99", (404, "model_not_found", "model")),
        (offer().encode(), "application/sdp", "more=x", (400, "unsupported_parameter", "more")),
        (
            offer(AUDIO.replace("sha-256", "sha-1")).encode(),
            "application/sdp",
            "",
            (400, "invalid_request", "sdp"),
        ),
    ],
)
async def test_refused(
    here: World, body: bytes, kind: str, query: str, expected: tuple[int, str, str | None]
) -> None:
    assert error(await call(here, body, kind, query=query)) == expected
    assert not here.service.calls


async def test_no_more_calls_than_allowed(here: World) -> None:
    for _ in range(2):
        assert (await call(here)).status == 201
    assert error(await call(here)) == (429, "overloaded", None)
    (first, _) = here.service.calls.values()
    await first.end()
    assert (await call(here)).status == 201


async def test_none_are_taken_where_none_are_allowed() -> None:
    async with world(max_calls=0) as here:
        assert error(await call(here)) == (503, "unavailable", None)


async def test_all_ports_may_be_in_use() -> None:
    async with world(call_ports="42917-42917") as here:
        assert (await call(here)).status == 201
        assert error(await call(here)) == (429, "overloaded", None)
        (made,) = here.service.calls.values()
        await made.end()
        assert (await call(here)).status == 201  # the port is free again
        (made,) = here.service.calls.values()
        await made.end()


async def test_a_client_secret_opens_one_call(here: World) -> None:
    secret = await secret_of(here)
    value = secret["value"]
    assert error(await call(here, b"v=0", key=value, query=""))[0] == 400  # and may try again
    with_session = form(sdp=offer(), session="{}")
    assert error(await call(here, *with_session, key=value, query=""))[2] == "session"
    assert (await call(here, key=value, query="")).status == 201
    (made,) = here.service.calls.values()
    assert made.session.id == secret["session"]["id"]
    assert made.session.settings.instructions == "be brief"
    assert error(await call(here, key=value, query=""))[:2] == (401, "invalid_api_key")


async def hang_up(here: World, call_id: str, key: str = KEY) -> Http:
    headers = {"authorization": f"Bearer {key}"}
    return await Http(here.app, f"{PATH}/{call_id}/hangup", headers=headers).done()


async def test_hanging_up(here: World) -> None:
    await call(here)
    (call_id,) = here.service.calls
    other = (await secret_of(here))["value"]
    assert error(await hang_up(here, call_id, other)) == (404, "call_not_found", "call_id")
    assert (await hang_up(here, call_id)).status == 200
    assert error(await hang_up(here, call_id)) == (404, "call_not_found", "call_id")
    assert not here.service.calls


async def test_no_socket_takes_a_call_over(here: World) -> None:
    await call(here)
    (made,) = here.service.calls.values()
    socket = Socket(
        here.app,
        query={"session_id": made.session.id},
        headers={"authorization": f"Bearer {KEY}"},
    )
    assert (await socket.receive())["error"]["param"] == "session_id"
    await socket.task
    assert not made.session.attachment.taken_over


async def test_a_key_that_is_withdrawn_ends_its_calls(here: World) -> None:
    await call(here)
    (made,) = here.service.calls.values()
    await made.session.expel("the API key is no longer accepted")
    await made.over()
    assert not here.service.calls
