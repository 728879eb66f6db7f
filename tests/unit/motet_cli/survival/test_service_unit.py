"""Test the systemd unit that `motet install-service` writes, against systemd's own check where it is installed."""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from motet_cli.main import main
from motet_cli.survival import service_unit, systemd
from motet_shared.errors import ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a folder in which units are written, and from which they run."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    for secret in service_unit._SECRETS:
        monkeypatch.delenv(secret, raising=False)
    return tmp_path


def fields(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and line[0] != "#")


def test_the_unit_runs_a_surviving_stack_in_this_folder(home: Path) -> None:
    found = fields(service_unit.unit(["--port", "8001"], name="motet", user=True))
    assert shlex.split(found["ExecStart"])[1:] == [
        *("-m", "motet_cli", "up", "--survive"),
        *("--port", "8001"),
    ]
    assert shlex.split(found["ExecStop"])[1:] == [
        *("-m", "motet_cli", "down"),
        *("--url", "http://127.0.0.1:8001"),
    ]
    assert found["WorkingDirectory"] == str(home)
    assert (found["KillMode"], found["Type"]) == ("process", "notify")
    assert "User" not in found


def test_a_unit_of_the_system_has_a_user_and_a_folder() -> None:
    found = fields(service_unit.unit([], name="front", user=False))
    assert found["User"]
    assert (found["RuntimeDirectory"], found["WantedBy"]) == ("front", "multi-user.target")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("user", [True, False])
def test_systemd_accepts_the_unit(home: Path, user: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_NOTE", 'a "b" %n $HOME \\')
    path = home / "motet.service"
    path.write_text(service_unit.unit(["--llm", "a b%n$c"], name="motet", user=user))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_words_are_what_they_were() -> None:
    assert service_unit._quoted("--port=8001") == "--port=8001"
    assert service_unit._quoted('a "b" %n $c \\') == '"a \\"b\\" %%n $$c \\\\"'
    with pytest.raises(ConfigError, match="line break"):
        service_unit._quoted("a\nb")


def test_secrets_stay_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_API_KEY", "sesame")
    with pytest.raises(ConfigError, match="MOTET_API_KEY: every user may read"):
        service_unit.unit([], name="motet", user=True)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--name", "../motet"], "--name: '../motet' is no name of a unit"),
        (["--", "--port", "0"], "--port: 0 is no port of a service"),
    ],
)
def test_wrong_options_are_named(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["install-service", "--user", *argv]) == 2
    assert told in capsys.readouterr().err


def test_it_is_written_and_removed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "config/systemd/user/motet.service"
    assert main(["install-service", "--user", "--print"]) == 0
    assert not path.exists()
    printed = capsys.readouterr().out
    assert main(["install-service", "--user"]) == 0
    assert path.read_text() == printed
    assert "systemctl --user enable --now motet" in capsys.readouterr().out
    assert main(["uninstall-service", "--user"]) == 0
    assert not path.exists()
    assert main(["uninstall-service", "--user"]) == 2


def test_systemd_is_told_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    systemd.notify("READY=1")  # without systemd
    for address in (str(tmp_path / "notify"), "@motet-test-notify"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
            server.bind(address.replace("@", "\0"))
            monkeypatch.setenv("NOTIFY_SOCKET", address)
            systemd.notify("READY=1")
            assert server.recv(100) == b"READY=1"
