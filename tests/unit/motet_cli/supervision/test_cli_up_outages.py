"""Test what `motet up` outlives: NATS that does not answer, and a reload with wrong settings."""

from __future__ import annotations

import asyncio
import io
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from motet_cli.main import up_arguments
from motet_cli.on_demand import start
from motet_cli.supervision import up
from motet_cli.supervision.logs import Log
from motet_cli.survival import settings_check
from motet_cli.survival.identity import Identity
from motet_cli.survival.record import Base, Measured, StackFolder, StackRecord
from motet_cli.survival.session import Adopted
from motet_shared.errors import ConfigError
from motet_shared.testing import free_port
from motet_shared.wire.transport import NatsUnreachable
from support.running.until import until

NOT_NEEDED = ("--config=none", "--film=none", "--tts=none", "--asr=none", "--draw=none")


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Provide the flags of a stack of one model, whose NATS server is another one."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    model = tmp_path / "tiny-llama"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    server = ("--nats", "nats://127.0.0.1:1", "--port", str(free_port()))
    return [*NOT_NEEDED, "--embed=none", "--llm", str(model), *server]


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log(io.StringIO())
    yield made
    made.close()


@pytest.fixture
def stack(flags: list[str], log: Log, monkeypatch: pytest.MonkeyPatch) -> Iterator[up.Up]:
    """Provide a run of which no process is started."""
    monkeypatch.setattr(up, "_NATS_PAUSE", 0.01)
    with socket.socket() as listener:
        yield up.Up(up.parse_options(up_arguments(flags)), log, listener)


class Unreachable:
    """Fail to connect twice, then do the work."""

    def __init__(self) -> None:
        self.tries = 0

    async def run(self, *given: Any) -> None:
        self.tries += 1
        if self.tries < 3:
            raise NatsUnreachable("nats_url: cannot connect")


async def test_models_on_demand_wait_for_nats(
    stack: up.Up, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loader = Unreachable()
    monkeypatch.setattr(start, "loader_of", lambda *given: loader)
    model: Any = SimpleNamespace(folder=SimpleNamespace(path=tmp_path))
    await stack._load_on_demand([(model, ())], asyncio.Event())
    assert loader.tries == 3


async def test_what_was_taken_over_waits_for_nats(
    stack: up.Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    rolling = Unreachable()
    monkeypatch.setattr(stack, "_rolling", lambda: SimpleNamespace(update=rolling.run))
    slot: Any = None
    await stack._complete(Adopted(start=[], ended=[slot]), [])
    assert rolling.tries == 3


async def test_a_reload_with_wrong_settings_is_refused(
    stack: up.Up, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was right when the stack began; what is read now decides."""
    file = tmp_path / "motet.toml"
    file.write_text("[settings]\ndecod = 2\n")
    given = [*flags, "--config", str(file), "--survive"]
    monkeypatch.setattr(sys, "argv", ["motet", "up", *given])
    notes: list[str] = []
    monkeypatch.setattr(stack._log, "note", lambda text, level="info": notes.append(text))
    reloaded = asyncio.create_task(stack._reloaded())
    stack._reload.set()
    await until(lambda: notes, 60.0)
    assert "decod" in notes[0]
    assert not reloaded.done()
    file.write_text("[settings]\ndecode = 2\n")
    stack._reload.set()
    async with asyncio.timeout(60.0):
        await reloaded
    assert len(notes) == 1


def test_the_port_of_what_is_taken_over_is_no_wrong_setting(flags: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        given = [*flags, "--survive", "--port", str(port)]
        with pytest.raises(ConfigError) as caught:
            settings_check.check(given)
        assert caught.value.param == "--port"
        record = StackRecord(
            supervisor=Identity(1, 1),
            base=Base(host="127.0.0.1", port=port, nats=None, store=None),
            nats_url="nats://127.0.0.1:1",
            credentials=None,
            measured=Measured(memory=8 << 30),
            orphan_seconds=60.0,
        )
        StackFolder(port).write(record)
        settings_check.check(given)
    for wrong, param in (("--port=0", "--survive"), ("--orphan-timeout=-1", "--orphan-timeout")):
        with pytest.raises(ConfigError) as caught:
            settings_check.check([*given, wrong])
        assert caught.value.param == param
