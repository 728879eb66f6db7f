"""A first host and one that joins, over real TLS on loopback: what is given, and to whom it is refused."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from motet_cli.joining import certificates, first_host, messages
from motet_cli.joining.admission import Admitted, ask
from motet_cli.joining.errors import (
    AuthorityMismatch,
    TokenExpired,
    TokenUnknown,
    TokenUsed,
    refusal,
)
from motet_cli.joining.first_host import FirstHost, prepare_folder
from motet_cli.joining.listen import Listen
from motet_cli.joining.messages import JoinRefusal, JoinRequest, ServiceOffer, StackOffer
from motet_cli.joining.token import Invitations, Token
from motet_shared.credentials import USERS, make_passwords
from motet_shared.errors import (
    BadRequest,
    ConfigError,
    MotetError,
    ProtocolMismatch,
    Unavailable,
)
from motet_shared.messages import PROTOCOL
from motet_shared.peer_tls import peer_tls
from motet_shared.testing import free_port
from support.running.refusals import refuses

HOST = "127.0.0.1"
OFFER = StackOffer(
    services=(ServiceOffer("decode"), ServiceOffer("tokenizer"), ServiceOffer("vad"))
)


def folder_of_stack(folder: Path, host: str = HOST) -> Path:
    make_passwords(folder)
    prepare_folder(folder, host)
    return folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of_stack(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of_stack(tmp_path_factory.mktemp("theirs"))


@pytest.fixture
def joining(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "joining").mkdir(mode=0o700)
    yield tmp_path / "joining"
    assert not list((tmp_path / "joining").glob("*.new")), "no key is left of a refusal"


def modes(folder: Path) -> dict[str, int]:
    """Return the mode of each file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in files}


@dataclass
class Serving:
    host: FirstHost
    invitations: Invitations
    told: list[str]

    @property
    def port(self) -> int:
        return self.host.listen.port

    def token(self, *roles: str, seconds: float = 60.0, uses: int = 1) -> Token:
        return self.invitations.issue(roles or ("decode",), seconds, uses)

    async def ask(self, token: Token | None, folder: Path) -> Admitted:
        return await ask(HOST, self.port, token, folder)


@asynccontextmanager
async def serving(folder: Path, offer: StackOffer = OFFER) -> AsyncIterator[Serving]:
    told: list[str] = []
    listen = Listen(HOST, free_port(), 4222)
    host = FirstHost(listen, folder, offer, told.append)
    invitations = host.invitations()
    async with host.serving(invitations):
        yield Serving(host, invitations, told)


async def test_a_host_gets_what_its_roles_need_and_no_more(ours: Path, joining: Path) -> None:
    async with serving(ours) as first:
        admitted = await first.ask(first.token("decode"), joining)
    assert admitted.address == HOST
    assert admitted.reply.nats_url == f"tls://{HOST}:4222"
    assert [one.role for one in admitted.reply.offer.services] == ["decode"]
    # An engine may change between decode and prefill; commands are the operator's.
    assert set(admitted.reply.passwords) == {"decode", "prefill", "operator"} < set(USERS)
    files = modes(joining)
    own = {"ca.crt", "host.crt", "host.key", "operator/operator"}
    assert files.keys() == own | {
        f"{a}/{b}" for a in ("decode", "prefill") for b in ("decode", "prefill")
    }
    assert set(files.values()) == {0o600}
    assert (joining / "decode" / "decode").read_text() == (ours / "decode" / "decode").read_text()
    assert peer_tls(*(joining / name for name in ("ca.crt", "host.crt", "host.key"))) is not None


async def test_the_certificate_is_for_the_address_of_the_host_alone(
    ours: Path, joining: Path
) -> None:
    key = joining / "other.key"
    request = certificates._openssl(
        [
            *("req", "-new", *certificates._KEY, "-keyout", str(key), "-subj", "/CN=gateway"),
            *("-addext", "subjectAltName=IP:192.0.2.9,DNS:gateway"),
        ]
    )
    signed = certificates.sign_request(ours, request, "192.0.2.1")
    text = ssl._ssl._test_decode_cert  # type: ignore[attr-defined]
    (joining / "signed.crt").write_text(signed)
    assert text(str(joining / "signed.crt"))["subjectAltName"] == (("IP Address", "192.0.2.1"),)
    with refuses(BadRequest, "request"):
        certificates.sign_request(ours, "no request", "192.0.2.1")


async def test_a_token_that_is_wrong_expired_or_used_is_refused(ours: Path, joining: Path) -> None:
    async with serving(ours) as first:
        good = first.token()
        wrong = replace(good, secret=first.token().secret[::-1])
        with refuses(TokenUnknown, "token"):
            await first.ask(wrong, joining)
        with refuses(TokenExpired, "token"):
            await first.ask(first.token(seconds=-1.0), joining)
        await first.ask(good, joining)
        with refuses(TokenUsed, "token"):
            await first.ask(good, joining)
        assert len([line for line in first.told if "refused" in line]) == 3
        assert not [line for line in first.told if good.secret in line]


async def test_a_token_of_another_stack_is_not_shown_to_this_one(
    ours: Path, theirs: Path, joining: Path
) -> None:
    async with serving(theirs) as first:
        of_ours = Token(certificates.fingerprint((ours / "ca.crt").read_text()), "s" * 32)
        with refuses(AuthorityMismatch, "--token") as caught:
            await first.ask(of_ours, joining)
        assert caught.value.code == "authority_mismatch"
        assert first.told == [], "it was asked nothing"
    assert modes(joining) == {}


async def test_a_host_with_the_right_authority_and_another_certificate_gets_nothing(
    ours: Path, theirs: Path, joining: Path
) -> None:
    """The authority's certificate is public: whoever copies it cannot speak for the stack."""
    heard = bytearray()
    hello = messages.Hello((ours / "ca.crt").read_text(), PROTOCOL, "0")

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(msgspec.json.encode(hello) + b"\n")
        heard.extend(await reader.read(65536))
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(theirs / "host.crt", theirs / "host.key")
    server = await asyncio.start_server(pretend, HOST, 0, ssl=context)
    token = Token(certificates.fingerprint((ours / "ca.crt").read_text()), "s" * 32)
    try:
        with refuses(AuthorityMismatch, "HOST:PORT"):
            await ask(HOST, server.sockets[0].getsockname()[1], token, joining)
    finally:
        server.close()
    assert not heard


async def test_the_name_that_was_given_must_be_that_of_the_certificate(
    tmp_path: Path, joining: Path
) -> None:
    folder = folder_of_stack(tmp_path / "elsewhere", "192.0.2.7")
    async with serving(folder) as first:
        with refuses(AuthorityMismatch, "HOST:PORT"):
            await first.ask(first.token(), joining)


async def test_another_version_of_the_wire_is_refused_by_both_sides(
    ours: Path, joining: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(ours) as first:
        token = first.token()
        with monkeypatch.context() as newer:
            newer.setattr(first_host, "PROTOCOL", PROTOCOL + 1)
            with refuses(ProtocolMismatch, "wire") as caught:
                await first.ask(token, joining)
        assert caught.value.code == "protocol_mismatch"
        for number in (str(PROTOCOL), str(PROTOCOL + 1)):
            assert number in caught.value.message
        request = await asyncio.to_thread(certificates.make_request, joining / "k")
        (joining / "k").unlink()
        wanted = JoinRequest(token.secret, request, HOST, PROTOCOL + 1, "9.9")
        answer = await raw(first, messages.encode(wanted) + b"\n")
        assert isinstance(answer, JoinRefusal)
        assert (answer.code, answer.param) == ("protocol_mismatch", "wire")
        await first.ask(token, joining)  # it was not used up


async def raw(first: Serving, line: bytes) -> object:
    """Send a line to the first host, and return its answer; None if it only closes."""
    context = ssl.create_default_context(cafile=str(first.host.folder / "ca.crt"))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    reader, writer = await asyncio.open_connection(HOST, first.port, ssl=context)
    await reader.readline()
    try:
        writer.write(line)
        found = await reader.readline()
    except OSError:
        return None
    finally:
        writer.close()
    return messages.answer_decoder.decode(found) if found else None


async def test_malformed_requests_are_refused_and_others_served(ours: Path, joining: Path) -> None:
    async with serving(ours) as first:
        for line in (b"\n", b"{}\n", b'{"type":"join"}\n', b"\xff\n", b"[" * 1000 + b"\n"):
            answer = await raw(first, line)
            assert isinstance(answer, JoinRefusal)
            assert (answer.code, answer.param) == ("invalid_request", "request")
        assert await raw(first, b"x" * (messages.MAX_LINE + 70000) + b"\n") is None
        reader, writer = await asyncio.open_connection(HOST, first.port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n" + bytes(1000))
        async with asyncio.timeout(30):
            assert b"hello" not in await reader.read(), "nothing is said without TLS"
        writer.close()
        await first.ask(first.token(), joining)


async def test_a_request_that_is_none_uses_up_no_certificate(ours: Path) -> None:
    async with serving(ours) as first:
        wanted = JoinRequest(first.token().secret, "garbage", HOST, PROTOCOL, "0")
        answer = await raw(first, messages.encode(wanted) + b"\n")
        assert isinstance(answer, JoinRefusal)
        assert answer.param == "request"


async def test_an_address_behind_nat_is_refused(ours: Path) -> None:
    async with serving(ours) as first:
        wanted = JoinRequest(first.token().secret, "x", "10.1.2.3", PROTOCOL, "0")
        answer = await raw(first, messages.encode(wanted) + b"\n")
        assert isinstance(answer, JoinRefusal)
        assert (answer.code, answer.param) == ("invalid_request", "address")


async def test_a_host_that_has_joined_joins_again_without_a_token(
    ours: Path, theirs: Path, joining: Path, tmp_path: Path
) -> None:
    async with serving(ours) as first:
        with refuses(ConfigError, "--token"):
            await first.ask(None, joining)
        await first.ask(first.token("tokenizer"), joining)
    key = (joining / "host.key").read_text()
    async with serving(ours) as first:  # the first host was restarted meanwhile
        again = await first.ask(None, joining)
        assert [one.role for one in again.reply.offer.services] == ["tokenizer"]
        assert (joining / "host.key").read_text() != key
        # A certificate of the authority that belongs to no host which has joined is not enough.
        stranger = tmp_path / "stranger"
        stranger.mkdir(mode=0o700)
        for name in ("ca.crt", "host.crt", "host.key"):
            shutil.copy(ours / name, stranger / name)
        with refuses(TokenUnknown, "token"):
            await first.ask(None, stranger)


async def test_nobody_at_the_address_is_named(joining: Path) -> None:
    token = Token(b"f" * 32, "s" * 32)
    with refuses(Unavailable, "HOST:PORT"):
        await ask(HOST, free_port(), token, joining)


async def test_a_server_that_says_something_else_is_named(ours: Path, joining: Path) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.com\r\n")
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ours / "host.crt", ours / "host.key")
    server = await asyncio.start_server(other, HOST, 0, ssl=context)
    try:
        with refuses(Unavailable, "HOST:PORT"):
            port = server.sockets[0].getsockname()[1]
            await ask(HOST, port, Token(b"f" * 32, "s" * 32), joining)
    finally:
        server.close()


def test_roles_of_an_invitation_are_those_of_the_stack(ours: Path) -> None:
    host = FirstHost(Listen(HOST, 4221, 4222), ours, OFFER, print)
    words = host.invite(host.invitations(), ["vad"], 60, 1).split()
    assert words[:4] == ["motet", "join", f"{HOST}:4221", "--token"]
    with refuses(ConfigError, "--services"):
        host.invite(host.invitations(), ["gateway"], 60, 1)


def test_errors_of_the_first_host_are_known_by_their_codes() -> None:
    assert isinstance(refusal("token_expired", "m", "token"), TokenExpired)
    assert isinstance(refusal("protocol_mismatch", "m", "wire"), ProtocolMismatch)
    newer = refusal("of_a_newer_release", "m", None)
    assert type(newer) is MotetError
    assert newer.code == "of_a_newer_release"
