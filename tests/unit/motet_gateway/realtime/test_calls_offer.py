"""SDP offers of calls: what is refused, which addresses are kept, and what is answered."""

from __future__ import annotations

import pytest

from motet_gateway.config import GatewayConfig
from motet_gateway.realtime.webrtc.network import Network
from motet_gateway.realtime.webrtc.offer import MOST_BYTES, checked_offer, completed_answer
from motet_shared.errors import BadRequest, ConfigError
from support.clients.offers import AUDIO, DATA, candidates, offer

VIDEO = AUDIO.replace("m=audio", "m=video").replace("a=mid:0", "a=mid:2")
PUBLIC, PRIVATE = "udp 1 1.1.1.1 40000 typ host", "udp 1 10.0.0.1 40000 typ host"


def refusal(sdp: str) -> tuple[str, str | None]:
    with pytest.raises(BadRequest) as caught:
        checked_offer(sdp, keep_public=False)
    return caught.value.code, caught.value.param


@pytest.mark.parametrize(
    "sdp",
    [
        "",
        "hello",
        offer(AUDIO.replace("opus/48000/2", "opux/48000/2")),
        offer(AUDIO.replace("a=rtcp-mux\n", "")),
        offer(AUDIO.replace("a=mid:0", "a=mid:1")),
        offer(AUDIO.replace("a=mid:0", "a=mid:7")),
        offer(AUDIO.replace("a=setup:actpass", "a=setup:wrong")),
        offer(AUDIO.replace("a=fingerprint", "a=finger")),
        offer(AUDIO.replace("a=ice-pwd", "a=ice-word")),
        offer(AUDIO.replace("089W", "0" * 300)),
        offer(AUDIO.replace("111 63 0", "111 x 0")),
        offer(AUDIO.replace("SAVPF 111 63 0", "SAVPF 999")),
        offer(AUDIO, DATA.replace("a=sctp-port:5000\n", "")),
        offer(AUDIO, DATA.replace("UDP/DTLS/SCTP", "DTLS/SCTP")),
        offer(AUDIO + candidates(*[PUBLIC] * 65)),
        offer(AUDIO + "a=x\n" * 1000),
        offer().replace("s=-", "s=-\r\na=ice-lite"),
        offer() + "a=fmtp:99 x=1\r\n",
    ],
)
def test_what_is_no_offer_of_a_call_is_refused(sdp: str) -> None:
    assert refusal(sdp) == ("invalid_request", "sdp")


@pytest.mark.parametrize(
    "sdp",
    ["v=0", offer(AUDIO, ""), offer("", DATA), offer(AUDIO + VIDEO), offer(AUDIO + AUDIO, DATA)],
)
def test_there_is_one_audio_section_and_one_data_channel(sdp: str) -> None:
    assert refusal(sdp) == ("unsupported_parameter", "sdp")


def test_a_long_offer_is_refused() -> None:
    assert refusal(offer() + "a" * MOST_BYTES)[0] == "payload_too_large"


def test_no_address_of_an_offer_is_used_without_a_server_that_needs_it() -> None:
    given = offer(AUDIO + candidates(PUBLIC, PRIVATE))
    assert "a=candidate" not in checked_offer(given, keep_public=False)


def test_addresses_of_the_own_network_are_never_used() -> None:
    private = [
        f"udp 1 {address} 40000 typ host"
        for address in (
            "10.0.0.1",
            "127.0.0.1",
            "169.254.169.254",
            "192.168.1.1",
            "224.0.0.1",
            "::1",
            "fd00::1",
            "::ffff:10.0.0.1",
            "64:ff9b::a00:1",
            "0b2f3a52-6f33-4a0e-8a5f-1a2b3c4d5e6f.local",
            "internal.example",
        )
    ]
    other = ["tcp 1 1.1.1.1 40000 typ host tcptype active", "udp 1 1.1.1.1 53 typ host"]
    kept = checked_offer(offer(AUDIO + candidates(*private, *other, PUBLIC)), keep_public=True)
    assert [line for line in kept.splitlines() if "candidate" in line] == [
        f"a=candidate:{len(private) + len(other)} 1 {PUBLIC}"
    ]


def test_few_addresses_are_kept() -> None:
    many = [f"udp 1 1.1.1.{number} 40000 typ host" for number in range(60)]
    kept = checked_offer(offer(AUDIO + candidates(*many)), keep_public=True)
    assert kept.count("a=candidate") == 16


def test_the_audio_section_leads_the_bundle() -> None:
    given = offer().replace("BUNDLE 0 1", "BUNDLE 1 0")
    assert "\r\na=group:BUNDLE 0 1\r\n" in checked_offer(given, keep_public=False)


def test_an_answer_asks_for_copies_of_lost_packets() -> None:
    answer = completed_answer("a=rtpmap:111 opus/48000/2\r\na=candidate:x\r\n")
    assert answer.splitlines()[1] == "a=fmtp:111 minptime=10;useinbandfec=1"


def test_announced_addresses_replace_those_that_are_bound() -> None:
    config = GatewayConfig(call_announced=("203.0.113.5",), call_ports="40000-40009")
    lines = [
        "a=candidate:1 1 udp 9 172.17.0.2 40001 typ host",
        "a=candidate:2 1 udp 9 fd00::2 7 typ host",
    ]
    announced = Network.of(config).announce("\r\n".join(lines)).splitlines()
    assert announced == [lines[0].replace("172.17.0.2", "203.0.113.5"), lines[1]]


def test_all_ports_of_a_range_are_tried() -> None:
    network = Network.of(GatewayConfig(call_ports="40000-40009"))
    assert sorted(network.order_of_ports()) == list(range(40000, 40010))
    assert network.addresses == ("127.0.0.1",)
    assert list(Network.of(GatewayConfig()).order_of_ports()) == [0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("call_ports", "x"),
        ("call_ports", "5-3"),
        ("call_ports", "40009-40000"),
        ("call_ports", "60000-70000"),
        ("call_addresses", ("here",)),
        ("call_announced", ("gateway.example",)),
        ("ice_servers", ("http://stun.example",)),
    ],
)
def test_settings_that_cannot_be_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        GatewayConfig(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name
