"""One role's password opens nothing of another's, and between hosts there is TLS with the stack's own CA."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import nats
import pytest

from e2e.stack import MotetStack, until
from motet_cli.main import main
from motet_shared.blobs.store import BlobStore
from motet_shared.blobs.tcp import BlobClient, Get
from motet_shared.credentials import SERVER_FILE, SHARED, USERS, make_passwords
from motet_shared.errors import BlobError, ConfigError
from motet_shared.peer_tls import peer_tls
from motet_shared.process.config import ProcessConfig
from motet_shared.testing import NATS_CONF, NatsServer
from motet_shared.wire.bus import Bus
from motet_shared.wire.transport import NatsTransport
from support.peers.stream_server import listening

TLS_CONF = NATS_CONF.with_name("nats-tls.conf")
FIRST, SECOND = "127.0.0.2", "127.0.0.3"  # two hosts


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with NatsServer() as made:
        yield made


async def admitted(server: NatsServer, user: str, password: str) -> bool:
    """Whether NATS lets a client in."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        await reader.readline()
        writer.write(
            b"CONNECT " + json.dumps({"user": user, "pass": password}).encode() + b"\r\nPING\r\n"
        )
        said = b""
        async with asyncio.timeout(10):
            while b"PONG" not in said and b"Authorization Violation" not in said:
                if not (line := await reader.readline()):
                    break
                said += line
        return b"PONG" in said
    finally:
        writer.close()


# --------------------------------------------------------------------------------------------------- a role's password
async def test_a_password_opens_its_own_user_alone(server: NatsServer) -> None:
    for user, password in server.passwords.items():
        for other in USERS:
            assert await admitted(server, other, password) == (other == user), (
                f"{user}'s password as {other}"
            )


async def test_the_tokenizer_cannot_hear_replies_of_the_gateway(server: NatsServer) -> None:
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error).lower())

    password = server.passwords["tokenizer"]
    with pytest.raises(Exception, match=r"(?i)authorization"):
        await nats.connect(server.url, user="gateway", password=password, allow_reconnect=False)
    client = await nats.connect(server.url, user="tokenizer", password=password, error_cb=note)
    try:
        for subject in (
            "motet.v2.inbox.gateway.>",
            "motet.v2.inbox.gateway.gateway-1.frames",
            "motet.v2.inbox.>",
        ):
            await client.subscribe(subject)
        await client.flush()
        async with asyncio.timeout(10):
            while len(refused) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert all("permissions violation for subscription" in text for text in refused)
    finally:
        await client.close()


# nats-py leaves the socket of a failed attempt to reconnect to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_reload", [False, True])
async def test_new_passwords_reach_processes_that_run(server: NatsServer, is_reload: bool) -> None:
    config = ProcessConfig(
        nats_url=server.url, nats_credentials=server.credentials, metrics_port=-1
    )
    bus, old = (
        await Bus.connect(config.instance_id("tokenizer"), config),
        server.passwords["tokenizer"],
    )
    try:
        server.rotate()
        if is_reload:
            os.kill(server.pid, signal.SIGHUP)
        else:
            await server.restart()
        async with asyncio.timeout(20):
            for transport in (bus.control, bus.frames):
                assert isinstance(transport, NatsTransport)
                client = transport.client
                while not (client.stats["reconnects"] and client.is_connected):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        await bus.control.flush()
        assert not await admitted(server, "tokenizer", old)
    finally:
        await bus.close()


# --------------------------------------------------------------------------------------------------------------- files
def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)  # the most careless
    try:
        passwords = make_passwords(tmp_path / "nats")
    finally:
        os.umask(before)
    assert passwords.keys() == set(USERS) == set(re.findall(r"user: (\w+)", NATS_CONF.read_text()))
    assert len(set(passwords.values())) == len(USERS)
    for path in (tmp_path / "nats").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    for role in USERS:
        found = {
            path.name: path.read_text().strip() for path in (tmp_path / "nats" / role).iterdir()
        }
        assert found == {user: passwords[user] for user in SHARED.get(role, (role,))}
    assert make_passwords(tmp_path / "nats") == passwords, "those that are there stay"
    (tmp_path / "nats" / "vad" / "vad").unlink()
    again = make_passwords(tmp_path / "nats")
    assert {user for user in USERS if again[user] != passwords[user]} == {"vad"}
    assert again["vad"] in (tmp_path / "nats" / SERVER_FILE).read_text()


def begun(stack: MotetStack) -> list[dict[str, Any]]:
    return [child for child in stack.children() if child["pid"]]


def test_processes_of_a_stack_hold_no_secret_where_others_look(tmp_path: Path) -> None:
    """In /proc, of every process of `motet up`, from its start on."""
    stack = MotetStack(tmp_path, "--asr", "none", "--tts", "none", "--vad", "0")
    stack.start()
    try:
        roles = {
            "nats",
            "gateway",
            "tokenizer",
        }  # engines begin the same way, but some seconds later
        until(lambda: {child["role"] for child in begun(stack)} >= roles, "they have begun", 60)
        passwords = stack.passwords
        folder = Path(stack.state()["nats_credentials"])
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.rglob("*/*"))
        assert (stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid) == (0o700, os.getuid())
        for child in begun(stack):
            shown = Path(f"/proc/{child['pid']}")
            text = (shown / "cmdline").read_text() + (shown / "environ").read_text()
            assert not [user for user, password in passwords.items() if password in text], child[
                "role"
            ]
            assert set(re.findall(r"MOTET_NATS_CREDENTIALS=([^\0]+)", text)) <= {
                str(folder / child["role"])
            }
    finally:
        stack.stop()
        stack._clean_up()
    assert not folder.exists(), "they end with the run"


# ----------------------------------------------------------------------------------------------------------- two hosts
def authority(folder: Path, *hosts: str) -> Path:
    """A folder with a CA and a certificate of each host, made as the documentation says it."""
    assert main(["credentials", "ca", str(folder)]) == 0
    for host in hosts:
        assert main(["credentials", "certificate", str(folder), host]) == 0
    return folder


def files(folder: Path, host: str, ca: Path | None = None) -> dict[str, Path]:
    return {
        "peer_ca": (ca or folder) / "ca.crt",
        "peer_cert": folder / f"{host}.crt",
        "peer_key": folder / f"{host}.key",
    }


def environment(settings: dict[str, Path]) -> dict[str, str]:
    return {f"MOTET_{name.upper()}": str(path) for name, path in settings.items()}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return authority(tmp_path_factory.mktemp("ours"), "127.0.0.1", FIRST, SECOND)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return authority(tmp_path_factory.mktemp("theirs"), "127.0.0.1", FIRST, SECOND)


async def refusal(server: NatsServer, **settings: Any) -> ConfigError:
    config = server.config("gateway", **settings)
    with pytest.raises(ConfigError) as caught:
        await Bus.connect(config.instance_id("gateway"), config)
    return caught.value


def test_keys_are_for_their_owner_alone(ours: Path) -> None:
    assert {stat.S_IMODE(path.stat().st_mode) for path in ours.glob("*.key")} == {0o600}


async def test_nats_speaks_to_certificates_of_the_stack_alone(ours: Path, theirs: Path) -> None:
    tls = peer_tls(**files(ours, "127.0.0.1"))
    assert tls is not None
    env = environment(files(ours, "127.0.0.1"))
    async with NatsServer(TLS_CONF, env=env, tls=tls.client) as server:
        given: dict[str, Any] = files(ours, FIRST)
        config = server.config("gateway", **given)
        bus = await Bus.connect(config.instance_id("gateway"), config)
        try:
            await bus.directory.wait_for(lambda directory: bool(directory.instances("gateway")), 10)
        finally:
            await bus.close()
        refused = await asyncio.gather(
            refusal(server),  # in plain text, with the right password
            refusal(server, **files(theirs, FIRST)),  # with another CA
            refusal(server, **files(theirs, FIRST, ca=ours)),  # a certificate of another CA
        )
        assert {error.code for error in refused} == {"config"}
        assert not await plain_greeting(server), "not even its greeting is told in plain text"


async def plain_greeting(server: NatsServer) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"PING\r\n")
    try:
        return await asyncio.wait_for(reader.read(100), 1.0)
    except (TimeoutError, ConnectionResetError):
        return b""
    finally:
        writer.close()


async def test_no_password_is_said_to_a_server_without_tls(ours: Path) -> None:
    """Nor to who stands in between and takes TLS out of the server's greeting."""
    heard = bytearray()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b'INFO {"server_id":"x","version":"2.12.0","max_payload":1024,"auth_required":true}\r\n'
        )
        heard.extend(await reader.read(65536))

    async with listening(greet) as port:
        url = f"nats://127.0.0.1:{port}"
        given: dict[str, Any] = files(ours, FIRST)
        config = ProcessConfig(
            nats_url=url, nats_password="p-of-the-gateway", metrics_port=-1, **given
        )
        with pytest.raises(ConfigError):
            await Bus.connect("gateway-1", config)
    assert heard, "it has tried"
    assert b"CONNECT" not in heard
    assert b"p-of-the-gateway" not in heard


async def test_bulk_data_crosses_hosts_under_tls_alone(
    ours: Path, theirs: Path, tmp_path: Path
) -> None:
    data = os.urandom(3 << 20)
    for name in ("a", "b"):  # hosts do not share /dev/shm
        (tmp_path / name).mkdir()
    async with AsyncExitStack() as stack:
        tls = peer_tls(**files(ours, FIRST))
        owner = await stack.enter_async_context(
            BlobStore("encoder-1", 8 << 20, folder=tmp_path / "a", host=FIRST, tls=tls)
        )
        other = BlobStore("decode-1", folder=tmp_path / "b", tls=peer_tls(**files(ours, SECOND)))
        reader = await stack.enter_async_context(other)
        ref = owner.put(data, readers=9)
        assert ref.fallback.startswith(FIRST)
        assert bytes(await reader.get(ref, release=False)) == data
        request = Get(ref.key, ref.nbytes, "decode-1")
        strangers = [
            None,
            peer_tls(**files(theirs, SECOND)),
            peer_tls(**files(theirs, SECOND, ca=ours)),
        ]
        for stranger in strangers:
            client = BlobClient(patience=2.0, tls=None if stranger is None else stranger.client)
            with pytest.raises(BlobError):
                await client.fetch(ref.fallback, request, memoryview(bytearray(ref.nbytes)))
            client.close()
        with pytest.raises(BlobError):
            await reader._client.fetch(
                ref.fallback, Get("0" * 32, ref.nbytes, "decode-1"), memoryview(bytearray(9))
            )
        assert bytes(await reader.get(ref)) == data, "it still serves"
        assert owner.stats()["refused"] >= len(strangers)


async def test_a_host_cannot_pass_for_another(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    wrong = peer_tls(**files(ours, SECOND))
    async with (
        BlobStore("encoder-1", 1 << 20, shared=False, host=FIRST, tls=wrong) as owner,
        BlobStore("decode-1", folder=tmp_path / "b", tls=peer_tls(**files(ours, SECOND))) as reader,
    ):
        with pytest.raises(BlobError, match="certificate"):
            await reader.get(owner.put(b"data"))


def test_settings_that_do_not_go_together_are_named(ours: Path) -> None:
    given: dict[str, Any] = files(ours, FIRST)
    for name in given:
        with pytest.raises(ConfigError) as caught:
            peer_tls(**{**given, name: None})
        assert caught.value.param == name
    with pytest.raises(ConfigError) as caught:
        peer_tls(**{**given, "peer_key": files(ours, SECOND)["peer_key"]})
    assert caught.value.param == "peer_cert"
    with pytest.raises(ConfigError) as caught:
        ProcessConfig(nats_password="p", nats_credentials=ours)
    assert caught.value.param == "nats_credentials"
    assert main(["credentials", "certificate", str(ours), "a name, DNS:evil"]) == 2
    assert main(["credentials", "ca", str(ours)]) == 2, "the authority that is there stays"
