"""The protocol: every struct survives the wire, evolves, and can be read with plain msgpack."""

import re

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_shared import errors, messages
from motet_shared.messages import (
    PROTOCOL,
    Accepted,
    BlobRef,
    Chat,
    Controls,
    Credit,
    End,
    Error,
    Frames,
    Generate,
    Item,
    Keepalive,
    Open,
    Sampling,
    Text,
    TokenLogprob,
    Tokens,
    ToolCallDelta,
    Usage,
    decode_controls,
    decode_feeds,
    decode_frames,
    decode_heartbeat,
    decode_open,
    encode,
)
from motet_shared.wire import subjects

numbers = st.integers(0, 2**53)
tokens = st.builds(
    Tokens,
    ids=st.lists(numbers, max_size=4),
    logprobs=st.none()
    | st.lists(
        st.builds(TokenLogprob, numbers, st.floats(-50, 0), st.just([(1, -2.5)])), max_size=2
    ),
)
texts = st.builds(
    Text,
    text=st.text(max_size=20),
    ids=st.lists(numbers, max_size=4),
    tools=st.none()
    | st.lists(st.builds(ToolCallDelta, numbers, st.text(), st.text(), st.text()), max_size=2),
)
frames = st.one_of(
    st.builds(Accepted, numbers),
    st.builds(Item, numbers, numbers, tokens | texts),
    st.builds(Keepalive, numbers, numbers),
    st.builds(End, numbers, numbers, st.text(), st.none() | st.builds(Usage, numbers, numbers)),
    st.builds(Error, numbers, numbers, st.text(), st.text(), st.booleans(), st.none() | st.text()),
)


@given(st.lists(frames, max_size=6))
def test_frames_survive_the_wire(parts: list[messages.Frame]) -> None:
    batch = Frames(PROTOCOL, "decode-1", parts)
    assert decode_frames(encode(batch)) == batch


@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_a_value_error_or_a_message(data: bytes) -> None:
    for decode in (decode_frames, decode_open, decode_controls, decode_feeds, decode_heartbeat):
        try:
            decode(data)
        except ValueError:
            continue


def test_plain_msgpack_reads_frames_as_arrays_and_opens_as_maps() -> None:
    batch = Frames(
        PROTOCOL, "tokenizer-1", [Item(7, 0, Text("hé", [5])), End(7, 1, "stop", Usage(3, 1))]
    )
    kind, version, sender, (item, end) = msgpack.unpackb(encode(batch))
    assert (kind, version, sender) == ("f", PROTOCOL, "tokenizer-1")
    assert item[:3] == ["i", 7, 0]
    assert item[3][:3] == ["x", "hé", [5]]
    assert end[:4] == ["e", 7, 1, "stop"]
    opened = msgpack.unpackb(
        encode(
            Open(
                v=2,
                caller="gateway-1",
                stream=7,
                credit=8,
                body=Generate(model="m", prompt=[1, 2], sampling=Sampling(temperature=0.0)),
            )
        )
    )
    assert opened["type"] == "open"
    assert opened["body"]["type"] == "generate"
    assert opened["body"]["prompt"] == [1, 2]


def test_a_plain_msgpack_client_can_write_them() -> None:
    data = msgpack.packb(
        {
            "type": "open",
            "v": 2,
            "caller": "gateway-1",
            "stream": 3,
            "credit": 4,
            "body": {
                "type": "chat",
                "model": "m",
                "messages": [{"role": "user", "content": "hi"}],
                "sampling": {"temperature": 0},
            },
        }
    )
    request = decode_open(data)
    assert isinstance(request.body, Chat)
    assert request.body.sampling.temperature == 0
    assert decode_controls(msgpack.packb(["k", 1, "gateway-1", [["c", 3, 64]]])) == Controls(
        1, "gateway-1", [Credit(3, 64)]
    )


def test_requests_evolve_unknown_fields_are_ignored_and_missing_ones_get_defaults() -> None:
    data = msgpack.packb(
        {
            "type": "open",
            "v": 2,
            "caller": "gateway-1",
            "stream": 3,
            "credit": 4,
            "new": 1,
            "body": {"type": "generate", "model": "m", "prompt": [1], "sampling": {"later": True}},
        }
    )
    assert decode_open(data).body == Generate(model="m", prompt=[1], sampling=Sampling())


def test_errors_point_at_the_field() -> None:
    data = msgpack.packb(
        {
            "type": "open",
            "v": 2,
            "caller": "gateway-1",
            "stream": "x",
            "credit": 4,
            "body": {"type": "echo"},
        }
    )
    with pytest.raises(msgspec.ValidationError, match=r"\$\.stream"):
        decode_open(data)


def test_every_error_code_is_unique_and_survives_the_wire() -> None:
    for code, cls in errors.BY_CODE.items():
        if cls is errors.MotetError:
            continue
        again = errors.from_wire(code, "what happened", cls.retryable, "field")
        assert (type(again).code, again.retryable, again.message, again.param) == (
            code,
            cls.retryable,
            "what happened",
            "field",
        )
    defined = [
        cls.code
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, errors.MotetError)
    ]
    assert len(defined) == len(set(defined))


def test_an_unknown_error_code_of_a_newer_peer_is_kept() -> None:
    error = errors.from_wire("from_the_future", "x", True)
    assert (error.code, error.retryable) == ("from_the_future", True)
    assert errors.MotetError.code == "error"


@pytest.mark.parametrize(
    "instance",
    ["", "gateway", "Gateway-1", "gateway-", "a.b-1", "gateway-1 2", "gateway->", "gateway-*"],
)
def test_instance_ids_from_the_wire_cannot_widen_a_subject(instance: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(instance))):
        subjects.control_at(instance)


def test_subjects_are_those_of_the_blueprint() -> None:
    assert subjects.operation("tokenizer", "chat") == "motet.v2.tokenizer.chat"
    assert subjects.open_at("decode-1f") == "motet.v2.decode.i.decode-1f.open"
    assert subjects.control_at("decode-1f") == "motet.v2.decode.i.decode-1f.ctl"
    assert subjects.heartbeat("decode-1f") == "motet.v2.ev.decode.decode-1f.heartbeat"
    assert (
        subjects.service("STATS", "motet-decode", "decode-1f")
        == "$SRV.STATS.motet-decode.decode-1f"
    )


def test_a_blob_reference_is_small() -> None:
    ref = BlobRef(
        transport="shm",
        address="motet-decode-1f-0",
        key="0.1",
        nbytes=1 << 30,
        dtype="bfloat16",
        shape=(4, 8),
    )
    assert len(encode(ref)) < 150


@pytest.mark.parametrize(
    ("body", "size"),
    [
        (Tokens([31999]), 36),
        (Tokens([1, 2, 3], [TokenLogprob(1, -0.5, [(1, -0.5)])]), 59),
        (Text(" hello", [31999]), 46),
    ],
)
def test_a_token_takes_few_bytes_on_the_wire(body: Tokens | Text, size: int) -> None:
    """Sent once per token and stream: a field or a longer tag shows here."""
    assert len(encode(Frames(PROTOCOL, "decode-0123abcd", [Item(7, 300, body)]))) == size
