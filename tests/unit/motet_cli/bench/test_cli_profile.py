"""Test `motet profile` up to the wire, and how it finds the stack."""

import gzip
import os
import stat
from pathlib import Path

import pytest

from motet_cli.commands.profile import save
from motet_cli.main import main
from motet_cli.supervision import connection
from motet_cli.supervision.connection import NatsAccess
from motet_shared.errors import ConfigError


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("MOTET_NATS_PASSWORD", raising=False)
    return tmp_path


def test_published_access_is_found_by_its_port(runtime: Path) -> None:
    access = NatsAccess("nats://127.0.0.1:4222", "sesame")
    with connection.published(8000, access):
        assert connection.find("http://127.0.0.1:8000", None) == access
        assert connection.find("http://localhost:8000/", None) == access
        (file,) = (runtime / "motet").iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "sesame" not in repr(access)
        for other in ("http://127.0.0.1:8001", "http://192.0.2.1:8000", "nonsense"):
            with pytest.raises(ConfigError) as caught:
                connection.find(other, None)
            assert caught.value.param == "--url"
    with pytest.raises(ConfigError) as caught:
        connection.find("http://127.0.0.1:8000", None)
    assert caught.value.param == "--url"


def test_passwords_of_other_servers_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOTET_NATS_PASSWORD", "p")
    assert connection.find("http://ignored", "nats://there:4222") == NatsAccess(
        "nats://there:4222", "p"
    )
    with connection.published(8000, NatsAccess("nats://there:4222")):
        assert connection.find("http://127.0.0.1:8000", None).nats_password == "p"


def test_variables_of_a_program_are_printed_for_a_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "with space")
    with connection.published(8000, NatsAccess("nats://here:1", nats_credentials=folder)):
        assert main(["credentials", "environment", "--role", "asr"]) == 0
        assert capsys.readouterr().out == (
            f"export MOTET_NATS_URL=nats://here:1\nexport MOTET_NATS_CREDENTIALS='{folder}/asr'\n"
        )
        assert main(["credentials", "environment", "--role", "nobody"]) == 2
        assert "--role" in capsys.readouterr().err
    assert main(["credentials", "environment"]) == 2
    assert capsys.readouterr().out == ""


def test_a_folder_that_others_can_write_is_rejected(runtime: Path) -> None:
    with connection.published(8000, NatsAccess("nats://127.0.0.1:4222")):
        os.chmod(runtime / "motet", 0o777)
        with pytest.raises(ConfigError) as caught:
            connection.find("http://127.0.0.1:8000", None)
        assert caught.value.param == "XDG_RUNTIME_DIR"
        os.chmod(runtime / "motet", 0o700)


@pytest.mark.parametrize(("name", "gzipped"), [("trace.json.gz", True), ("trace.json", False)])
def test_traces_are_gzipped_by_suffix(tmp_path: Path, name: str, gzipped: bool) -> None:
    plain = b'{"traceEvents": [{"name": "engine step 0"}, {"name": "aten::mm"}, {"name": "engine step 1"}]}'
    assert save(tmp_path / name, gzip.compress(plain)) == 2
    written = (tmp_path / name).read_bytes()
    assert (gzip.decompress(written) if gzipped else written) == plain
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_wrong_options_are_rejected_before_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--output", str(tmp_path / "trace.json.gz")]) == 2
    message = capsys.readouterr().err
    assert "--url: " in message
    assert "http://127.0.0.1:8000" in message
    assert main(["profile", "--output", str(tmp_path / "none" / "trace.json.gz")]) == 2
    assert "--output: " in capsys.readouterr().err


def test_an_unreachable_nats_server_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["profile", "--nats", "nats://127.0.0.1:9", "--output", str(tmp_path / "t.json")]) == 2
    )
    assert "nats://127.0.0.1:9" in capsys.readouterr().err
