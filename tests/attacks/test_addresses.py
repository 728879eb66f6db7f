"""Addresses of pictures that lead into the server's own network, or that parsers read differently: 400, never 500."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_gateway.http.problems import Problem
from motet_gateway.http.remote import fetch, is_public
from motet_shared.errors import BadRequest

CLOSED = (
    # the server itself and its network, as IPv4
    "0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 127.0.0.1 127.255.255.254 169.254.169.254 172.31.255.255 192.0.2.1 192.168.0.1"
    " 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 240.0.0.1 255.255.255.255 "
    # as IPv6
    ":: ::1 fe80::1 fe80::1%lo fd00:ec2::254 fec0::1 feff::1 ff02::1 100::1 2001:db8::1 3fff::1 5f00::1 "
    # IPv4 in IPv6: compatible, mapped, translated, NAT64 of either kind, 6to4, Teredo, ISATAP
    "::127.0.0.1 ::8.8.8.8 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:0:127.0.0.1 ::ffff:0:7f00:1 64:ff9b::7f00:1 "
    "64:ff9b::10.0.0.1 64:ff9b:1::7f00:1 64:ff9b:1:ffff:ffff:ffff:7f00:1 64:ff9b:1::8.8.8.8 2002:7f00:1::1 2002:a00:1::"
    " 2001:0:7f00:1:: 2606:4700::5efe:7f00:1 2606:4700::200:5efe:10.0.0.1"
).split()
OPEN = "1.1.1.1 8.8.8.8 93.184.216.34 2606:4700::1111 64:ff9b::808:808 ::ffff:8.8.8.8 2002:808:808::1".split()


async def refused(url: str) -> BadRequest:
    with pytest.raises(BadRequest) as refusal:
        await fetch(url, "messages[0].content[0].image_url.url", most=1000, seconds=5)
    problem = Problem.of(refusal.value)
    assert (problem.status, problem.param) == (400, "messages[0].content[0].image_url.url")
    return refusal.value


@pytest.mark.parametrize("address", CLOSED)
def test_no_address_of_the_own_network_is_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", OPEN)
def test_the_open_internet_is_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "[64:ff9b:1::7f00:1]",
        "[::127.0.0.1]",
        "[::ffff:0:127.0.0.1]",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "0177.0.0.1",
        "0",
        "localhost",
        "a@127.0.0.1",
        "127.0.0.1.",
    ],
)
async def test_the_own_network_is_refused_before_a_connection(host: str) -> None:
    met: list[Any] = []
    server = await asyncio.start_server(lambda *_: met.append(True), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        await refused(f"http://{host}:{port}/")
    assert not met


@pytest.mark.parametrize(
    "url",
    [
        "http://\uff11\uff12\uff17.0.0.1/",  # full-width digits
        "http://127.0.0.1:\uff18\uff10/",
        "http://127.0.0.1:\u0668\u0660/",  # Arabic digits
        "http://\u2460\u2461\u2466.0.0.1/",
        "http://127\u30020\u30020\u30021/",  # ideographic full stops
        "http://\u24dbocalhost/",
        "http://127.0.0.1/\xe9",
        "http://\xe9.invalid/",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:-1/",
        "http://127.0.0.1:http/",
        "http://[::1/",
        "http://[\uff11::1]/",
        "http://[fe80::1%25lo]/",
        "http://" + "a" * 300 + "/",
        "http:///",
        "http://\x00/",
    ],
)
async def test_urls_that_are_none_are_a_bad_request(url: str) -> None:
    await refused(url)


@settings(max_examples=40)
@given(
    st.text(
        st.sampled_from("0123456789.:[]@%/\\#?-\uff11\uff0e\u3002\u0660\x00 \n\xe9"), max_size=24
    )
)
def test_no_host_is_an_error_of_the_server(host: str) -> None:
    async def attempt() -> None:
        try:
            await fetch(f"http://{host}", "url", most=10, seconds=5, allowed=lambda _: False)
        except BadRequest as error:
            if error.param != "url":
                raise AssertionError(f"{host!r}: {error}") from error
        else:
            raise AssertionError("nothing is allowed, and something was fetched")

    asyncio.run(attempt())
