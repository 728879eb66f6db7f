"""Tenants at the door: who is let in, what each may use, and that all of it comes back when clients leave."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from openai.types.realtime import RateLimitsUpdatedEvent

from motet_gateway.tenancy.tenant_sites import TenantSites
from motet_gateway.tenancy.tenants_file import TenantsFile
from motet_shared.errors import ConfigError, ContextTooLong, InternalError
from motet_shared.messages import Chat
from motet_shared.tenants import digest, load_tenants
from motet_shared.testing import settle
from support.clients.gateway_client import Socket, session, world
from support.running.until import until
from support.services.fake_services import MODEL, words
from support.stages.tenants_stage import (
    ACME,
    GONE,
    OTHER,
    Limited,
    bearer,
    document,
    limited,
    refused,
)


# ------------------------------------------------------------------------------------------------------------ who asks
async def test_each_key_is_its_tenants_and_nobody_else_gets_in(tmp_path: Path) -> None:
    async with limited(tmp_path, api_key="plain") as here:
        for key, tenant in ((ACME, "acme"), (OTHER, "other"), ("plain", "default")):
            assert (await here.done(key)).status == 200
            assert here.made.tokenizer.requests[-1].tenant == tenant
        for key in ("", "sk-motet-nobody", digest(ACME)):
            http = await here.done(key)
            assert (http.status, http.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_a_file_without_keys_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("")
    async with world(tenants_file=path) as made:
        assert (await made.ask().done()).status == 401


async def test_users_divide_the_share_of_their_tenant_and_no_other(tmp_path: Path) -> None:
    async with limited(tmp_path) as here:
        await here.done(user="other")
        assert here.made.tokenizer.requests[-1].tenant == "acme\0other"
        await here.done(user="\0other")
        assert here.made.tokenizer.requests[-1].tenant.split("\0")[0] == "acme"


async def test_a_tenant_is_served_at_its_sites_alone(tmp_path: Path) -> None:
    async with limited(tmp_path, 'sites = ["eu-1", "eu-2"]') as here:
        http = await here.done()
        assert (http.status, http.json()["error"]["code"]) == (403, "site_not_allowed")
        assert http.json()["error"]["param"] == "sites"
        assert (
            "eu-1, eu-2, and this gateway has no site (--site)" in http.json()["error"]["message"]
        )
        assert (await here.done(OTHER)).status == 200
        here.path.write_text(document('sites = ["eu-1"]'))
        here.made.service._use(load_tenants(here.path))
        here.made.service.tenant_sites = TenantSites("eu-1", here.made.service.authenticator.tenant)
        http = await here.done()
        assert (http.status, http.json()["error"]["code"]) == (503, "no_allowed_site")
        assert "ready at eu-1, the sites allowed" in http.json()["error"]["message"]
        assert [one.tenant for one in here.made.tokenizer.requests] == ["other"]


async def test_only_who_may_sees_the_metrics(tmp_path: Path) -> None:
    async with limited(tmp_path, "metrics = true") as here:
        assert (await here.made.get("/metrics", bearer()).done()).status == 200
        http = await here.made.get("/metrics", bearer(OTHER)).done()
        assert (http.status, http.json()["error"]["code"]) == (403, "forbidden")


# ------------------------------------------------------------------------------------------------------------- requests
async def test_requests_per_minute(tmp_path: Path) -> None:
    async with limited(tmp_path, "requests_per_minute = 3") as here:
        for left in (2, 1, 0):
            http = await here.done()
            assert http.status == 200
            assert http.headers["x-ratelimit-limit-requests"] == "3"
            assert http.headers["x-ratelimit-remaining-requests"] == str(left)
            assert http.headers["x-ratelimit-reset-requests"] == f"{(3 - left) * 20}s".replace(
                "60s", "1m0s"
            )
        error = await refused(http := here.ask())
        assert error["type"] == "requests"
        assert (http.headers["retry-after"], http.headers["x-ratelimit-remaining-requests"]) == (
            "20",
            "0",
        )
        assert (await here.done(OTHER)).status == 200, "another tenant has limits of its own"
        here.now.wait(19.9)
        await refused(http := here.ask())
        assert http.headers["retry-after"] == "1"
        here.now.wait(0.1)
        assert (await here.done()).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
        ("/v1/score", {"text_1": "x", "text_2": "y"}),
        ("/v1/audio/speech", {"input": "x"}),
        ("/v1/audio/transcriptions", {}),
        ("/v1/audio/translations", {}),
        ("/v1/images/generations", {"prompt": "x"}),
        ("/v1/images/edits", {}),
        ("/v1/images/jobs", {"prompt": "x"}),
        ("/v1/videos", {"prompt": "x"}),
        ("/v1/videos/x", None),
        ("/v1/videos/x/content", None),
        ("/v1/videos/x/remix", {"prompt": "x"}),
        ("/v1/realtime/client_secrets", {}),
        ("/api/chat", {"messages": []}),
        ("/api/generate", {"prompt": "x"}),
        ("/api/embed", {"input": "x"}),
        ("/api/embeddings", {"prompt": "x"}),
        ("/api/show", {}),
        ("/api/tags", None),
        ("/api/ps", None),
        ("/v1/models", None),
        (f"/v1/models/{MODEL}", None),
        ("/v1/audio/voices", None),
        ("/v1/images/jobs/x", None),
    ],
)
async def test_every_endpoint_counts(
    tmp_path: Path, path: str, body: dict[str, Any] | None
) -> None:
    async with limited(tmp_path, "requests_per_minute = 1") as here:
        assert (await here.done()).status == 200
        http = here.made.get(path, bearer()) if body is None else here.ask(path=path, **body)
        await refused(http)
        assert http.headers["x-ratelimit-limit-requests"] == "1"
        assert http.headers["retry-after"] == "60"


async def test_without_limits_nothing_is_told(tmp_path: Path) -> None:
    async with limited(tmp_path) as here:
        http = await here.done(OTHER, stream=True)
        assert not [name for name in http.headers if name.startswith("x-ratelimit")]


# --------------------------------------------------------------------------------------------------------------- tokens
async def test_tokens_are_held_and_settled(tmp_path: Path) -> None:
    """The fake's usage: 7 tokens of the prompt, and one per word."""
    async with limited(tmp_path, "tokens_per_minute = 1000") as here:
        here.made.tokenizer.pace = 60
        http = here.ask(max_tokens=500, stream=True)
        await settle(50)
        assert here.tokens() == 1000 - 500 - 6, "the prompt has about six tokens"
        http.leave()
        await http.done()
        assert here.tokens() == 1000 - 6 - 1, "what was not generated comes back"
        here.made.tokenizer.pace = 0
        here.now.wait(60)
        http = await here.done(max_tokens=500)
        assert here.tokens() == 1000 - http.json()["usage"]["total_tokens"] == 1000 - 10
        assert (await here.done(max_tokens=1)).headers["x-ratelimit-limit-tokens"] == "1000"


async def test_choices_of_one_prompt_cost_what_their_usage_says(tmp_path: Path) -> None:
    async with limited(tmp_path, "tokens_per_minute = 1000") as here:
        http = await here.done(n=3, max_tokens=5)
        assert here.tokens() == 1000 - http.json()["usage"]["total_tokens"] == 1000 - 7 - 3 * 3
        here.now.wait(60)
        http = await here.done(path="/v1/completions", prompt=["a b", "c"], n=2)
        assert here.tokens() == 1000 - http.json()["usage"]["total_tokens"]


async def test_too_many_tokens_wait_their_time(tmp_path: Path) -> None:
    async with limited(tmp_path, "tokens_per_minute = 600") as here:
        here.made.tokenizer.reply = lambda request: words("x" + " y" * 592)
        assert (await here.done(max_tokens=500)).status == 200
        assert here.tokens() == 0, "593 words, 7 of the prompt: beyond what was held"
        error = await refused(http := here.ask(max_tokens=94))
        assert error["type"] == "tokens"
        assert http.headers["retry-after"] == "10", "6 and 94 tokens, 10 a second"
        assert http.headers["x-ratelimit-remaining-tokens"] == "0"
        here.now.wait(10)
        assert (await here.done(max_tokens=94)).status == 200


async def test_a_request_beyond_a_minutes_worth_needs_a_whole_one(tmp_path: Path) -> None:
    async with limited(tmp_path, "tokens_per_minute = 60") as here:
        here.made.tokenizer.reply = lambda request: words("x" + " y" * 99)
        assert (await here.done(max_tokens=4000)).status == 200
        assert here.tokens() == 60 - 107
        await refused(http := here.ask(max_tokens=4000))
        assert http.headers["retry-after"] == "107"
        assert (await here.done(OTHER)).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_what_fails_before_its_first_token_costs_none(tmp_path: Path, stream: bool) -> None:
    async with limited(tmp_path, "tokens_per_minute = 1000\nconcurrent_streams = 1") as here:
        here.made.tokenizer.error = InternalError("a bug")
        assert (await here.done(stream=stream)).status == 500
        assert here.tokens() == 1000
        here.made.tokenizer.fail_after = 2
        await here.done(stream=stream)
        assert here.tokens() == 1000 - 6 - 2
        assert here.tenant().streams.open == 0


# -------------------------------------------------------------------------------------------------------------- streams
@pytest.mark.parametrize("stream", [True, False])
async def test_concurrent_streams_come_back_whoever_leaves(tmp_path: Path, stream: bool) -> None:
    async with limited(tmp_path, "concurrent_streams = 2") as here:
        here.made.tokenizer.pace = 60
        both = [here.ask(stream=stream), here.ask(stream=stream)]
        await settle(50)
        error = await refused(here.ask())
        assert "2 replies are being generated" in error["message"]
        both[0].leave()
        await both[0].done()
        assert here.tenant().streams.open == 1
        await refused(here.ask(n=2))
        both[1].leave()
        await both[1].done()
        assert here.tenant().streams.open == here.made.service.limits.active == 0
        here.made.service.authenticator.check_integrity()


async def test_who_tries_again_at_once_is_refused_later_and_later(tmp_path: Path) -> None:
    async with limited(tmp_path, "concurrent_streams = 1\nrequests_per_minute = 1000") as here:
        delay = here.tenant().refusal_delay
        assert [delay() for _ in range(21)] == [0.0] * 21
        assert [delay() for _ in range(4)] == pytest.approx([0.05, 0.1, 0.15, 0.2])
        here.made.tokenizer.pace = 60
        loop, running = asyncio.get_running_loop(), here.ask(stream=True)
        await settle(50)
        began = loop.time()
        await refused(here.ask())
        assert loop.time() - began >= 0.25
        running.leave()
        await running.done()
        assert max(delay() for _ in range(100)) == 2.0
        here.now.wait(60)
        assert [delay() for _ in range(21)] == [0.0] * 21


async def test_more_choices_than_ever_fit_are_a_bad_request(tmp_path: Path) -> None:
    async with limited(tmp_path, "concurrent_streams = 2") as here:
        http = await here.done(n=3)
        assert (http.status, http.json()["error"]["param"]) == (400, "n")


async def test_clients_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    async with limited(tmp_path, "concurrent_streams = 64\ntokens_per_minute = 1000000") as here:
        here.made.tokenizer.pace = 60
        for phase in range(12):  # from before the request is read to the middle of its stream
            asked = [here.ask(stream=bool(number % 2), n=1 + number % 3) for number in range(6)]
            await settle(phase)
            for http in asked:
                http.leave()
            await asyncio.gather(*(http.done() for http in asked))
        await settle(50)
        assert here.tenant().streams.open == here.made.service.limits.active == 0
        assert here.tokens() >= 1_000_000 - 12 * 6 * (6 + 3), "no hold is left"


# -------------------------------------------------------------------------------------------------- context and tiers
async def test_context_and_tier_go_along(tmp_path: Path) -> None:
    async with limited(tmp_path, 'max_context = 100\nservice_tier = "default"') as here:
        await here.done()
        request = here.made.tokenizer.requests[-1]
        assert isinstance(request, Chat)
        assert (request.max_context, request.priority) == (100, 0)
        await here.done(path="/v1/completions", prompt="x", service_tier="flex")
        request = here.made.tokenizer.requests[-1]
        assert (request.max_context, request.priority) == (100, -1)
        http = await here.done(service_tier="priority")
        assert (http.status, http.json()["error"]["param"]) == (400, "service_tier")
        await here.done(OTHER, service_tier="priority")
        assert here.made.tokenizer.requests[-1].priority == 1


async def test_a_tenant_of_the_lowest_tier_goes_after_others_by_itself(tmp_path: Path) -> None:
    async with limited(tmp_path, 'service_tier = "flex"') as here:
        for fields in ({}, {"service_tier": "auto"}, {"service_tier": "flex"}):
            await here.done(**fields)
            assert here.made.tokenizer.requests[-1].priority == -1
        assert (await here.done(service_tier="default")).status == 400


# ------------------------------------------------------------------------------------------------------------- sessions
def socket(here: Limited, key: str = ACME) -> Any:
    return session(here.made.app, headers=bearer(key))


async def turn(talk: Socket) -> list[Any]:
    talk.say("hello")
    talk.send("response.create")
    return await talk.until("rate_limits.updated", "error")


async def test_a_session_has_its_tenants_limits(tmp_path: Path) -> None:
    async with (
        limited(tmp_path, "requests_per_minute = 3\ntokens_per_minute = 1000") as here,
        socket(here) as talk,
    ):
        for left in (1, 0):
            event = (await turn(talk))[-1]
            RateLimitsUpdatedEvent.model_validate(event)
            told = {limit["name"]: limit for limit in event["rate_limits"]}
            assert (told["requests"]["limit"], told["requests"]["remaining"]) == (3, left)
            assert (told["tokens"]["limit"], told["tokens"]["remaining"]) == (
                1000,
                1000 - 10 * (2 - left),
            )
            assert told["tokens"]["reset_seconds"] == pytest.approx(0.6 * (2 - left))
        assert here.made.tokenizer.requests[-1].tenant == "acme"
        error = (await turn(talk))[-1]["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        here.now.wait(20)
        assert (await turn(talk))[-1]["type"] == "rate_limits.updated", "the session lived on"


async def test_too_many_sessions_and_too_many_attempts_are_closed(tmp_path: Path) -> None:
    async with limited(tmp_path, "concurrent_sockets = 1\nrequests_per_minute = 3") as here:
        async with socket(here):
            for message in (
                "1 sessions are open",
                "1 sessions are open",
                "rate limit of 3 requests",
            ):
                late = Socket(here.made.app, headers=bearer())
                error = (await late.expect("error"))["error"]
                assert error["code"] == "rate_limit_exceeded"
                assert message in error["message"]
                await asyncio.wait_for(late.task, 5)
                assert late.closed == 1013
        assert here.tenant().sockets.open == 0
        here.now.wait(60)
        async with socket(here):
            assert here.tenant().sockets.open == 1


async def test_who_leaves_a_session_in_the_middle_frees_its_stream(tmp_path: Path) -> None:
    async with limited(tmp_path, "concurrent_streams = 1\ntokens_per_minute = 1000") as here:
        here.made.tokenizer.pace = 60
        async with socket(here) as talk:
            talk.say("hello")
            talk.send("response.create")
            await talk.until("response.output_text.delta")
            assert here.tenant().streams.open == 1
            await refused(here.ask())
        await settle(50)
        assert here.tenant().streams.open == here.tenant().sockets.open == 0
        assert here.tokens() > 980


async def test_a_conversation_beyond_the_context_cap_loses_its_oldest_turns(tmp_path: Path) -> None:
    async with limited(tmp_path, "max_context = 50") as here, socket(here) as talk:
        await turn(talk)
        assert here.made.tokenizer.requests[-1].max_context == 50
        here.made.tokenizer.error = ContextTooLong("60 tokens")
        await turn(talk)
        assert len(here.made.tokenizer.requests) > 2


# -------------------------------------------------------------------------------------------------- a file that changes


def rewrite(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)


async def test_a_revoked_key_is_refused_within_seconds(tmp_path: Path) -> None:
    async with limited(tmp_path) as here:
        rewrite(here.path, document("", (ACME, GONE)))
        here.made.service.watch()
        keys = here.made.service.authenticator._keys
        await until(lambda: here.made.service.authenticator._keys is not keys)
        assert (await here.done(GONE)).status == 200
        async with socket(here, OTHER):
            talk = Socket(here.made.app, headers=bearer(GONE))
            await talk.expect("session.created")
            rewrite(here.path, document("requests_per_minute = 1"))
            await until(lambda: talk.closed)
            assert talk.closed == 3000, "a session does not outlive its key"
            assert (await here.done(GONE)).status == 401
            await settle()
            assert len(here.made.service.sessions) == 1
        assert (await here.done()).status == 200
        await refused(here.ask())
        await here.made.service.close()


async def test_a_broken_file_changes_nothing_and_says_where(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with limited(tmp_path, "requests_per_minute = 1") as here:
        watched = here.made.service.tenants_file
        assert watched is not None
        assert not watched.changed()
        rewrite(here.path, document('requests_per_minute = "lots"'))
        assert watched.changed()
        assert not watched.changed(), "it is told once"
        watched.read()
        assert "line 2" in caplog.text
        assert "requests_per_minute" in caplog.text
        assert (await here.done()).status == 200
        await refused(here.ask())
        here.path.unlink()
        assert watched.changed()
        watched.read()
        assert "motet keys new" in caplog.text
        assert (await here.done(OTHER)).status == 200


async def test_what_was_used_stays_used(tmp_path: Path) -> None:
    async with limited(tmp_path, "requests_per_minute = 10") as here:
        for _ in range(4):
            await here.done()
        rewrite(here.path, document("requests_per_minute = 6"))
        assert here.made.service.tenants_file is not None
        here.made.service.tenants_file.read()
        assert (await here.done()).headers["x-ratelimit-remaining-requests"] == "1"


async def test_what_a_tenant_has_used_stays_used_when_it_returns(tmp_path: Path) -> None:
    async with limited(tmp_path, "requests_per_minute = 10") as here:
        for _ in range(4):
            await here.done()
        assert here.made.service.tenants_file is not None
        for text, status in (("", 401), (document("requests_per_minute = 6"), 200)):
            rewrite(here.path, text)
            here.made.service.tenants_file.read()
            http = await here.done()
            assert http.status == status
        assert http.headers["x-ratelimit-remaining-requests"] == "1"


async def test_a_file_that_is_wrong_at_the_start_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[tenants.acme]\nfoo = 1")
    with pytest.raises(ConfigError, match="2"):
        async with world(tenants_file=path):
            pass


def test_a_file_that_comes_later_is_seen(tmp_path: Path) -> None:
    watched = TenantsFile(tmp_path / "t.toml", lambda tenants: None)
    assert not watched.changed()
    (tmp_path / "t.toml").write_text("")
    assert watched.changed()


# -------------------------------------------------------------------------------------------------------------- metrics
async def test_metrics_name_tenants_and_no_keys(tmp_path: Path) -> None:
    async with limited(tmp_path, "requests_per_minute = 2") as here:
        await here.done()
        await here.done(stream=True)
        await refused(here.ask())
        await here.done(OTHER)
        text = here.metrics()
        for line in (
            'motet_tenant_requests_total{instance="X",role="gateway",tenant="acme"} 2.0',
            'motet_tenant_tokens_total{instance="X",role="gateway",tenant="acme"} 20.0',
            'motet_tenant_refusals_total{instance="X",limit="requests",role="gateway",tenant="acme"} 1.0',
            'motet_tenant_requests_total{instance="X",role="gateway",tenant="other"} 1.0',
        ):
            assert line.replace("X", here.made.service.bus.instance) in text
        for key in (ACME, OTHER):
            assert key not in text
            assert digest(key)[:12] not in text
