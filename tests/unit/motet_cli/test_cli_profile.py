"""`motet profile` up to the wire, and how it finds the stack."""

import gzip
import os
import stat
from pathlib import Path

import pytest

from motet_cli.commands.profile import save
from motet_cli.main import main
from motet_cli.supervision import connection
from motet_cli.supervision.connection import Connection
from motet_shared.errors import ConfigError


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("MOTET_NATS_PASSWORD", raising=False)
    return tmp_path


def test_a_connection_is_found_by_its_port_while_it_is_published(runtime: Path) -> None:
    mine = Connection("nats://127.0.0.1:4222", "sesame")
    with connection.published(8000, mine):
        assert connection.find("http://127.0.0.1:8000", None) == mine
        assert connection.find("http://localhost:8000/", None) == mine
        (file,) = (runtime / "motet").iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "sesame" not in repr(mine)
        for other in ("http://127.0.0.1:8001", "http://192.0.2.1:8000", "nonsense"):
            with pytest.raises(ConfigError, match="--url: no `motet up`"):
                connection.find(other, None)
    with pytest.raises(ConfigError, match="--nats URL"):
        connection.find("http://127.0.0.1:8000", None)


def test_a_server_of_ones_own_takes_its_password_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOTET_NATS_PASSWORD", "p")
    assert connection.find("http://ignored", "nats://there:4222") == Connection(
        "nats://there:4222", "p"
    )
    with connection.published(8000, Connection("nats://there:4222")):
        assert connection.find("http://127.0.0.1:8000", None).nats_password == "p"


def test_a_folder_that_others_can_write_to_is_not_trusted(runtime: Path) -> None:
    with connection.published(8000, Connection("nats://127.0.0.1:4222")):
        os.chmod(runtime / "motet", 0o777)
        with pytest.raises(ConfigError, match="only its user"):
            connection.find("http://127.0.0.1:8000", None)
        os.chmod(runtime / "motet", 0o700)


@pytest.mark.parametrize(("name", "packed"), [("trace.json.gz", True), ("trace.json", False)])
def test_a_trace_is_gzipped_if_its_name_says_so(tmp_path: Path, name: str, packed: bool) -> None:
    plain = b'{"traceEvents": [{"name": "engine step 0"}, {"name": "aten::mm"}, {"name": "engine step 1"}]}'
    assert save(tmp_path / name, gzip.compress(plain)) == 2
    written = (tmp_path / name).read_bytes()
    assert (gzip.decompress(written) if packed else written) == plain
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_no_stack_and_no_folder_are_told_before_anything_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--output", str(tmp_path / "trace.json.gz")]) == 2
    assert (
        "--url: no `motet up` of this user serves http://127.0.0.1:8000" in capsys.readouterr().err
    )
    assert main(["profile", "--output", str(tmp_path / "none" / "trace.json.gz")]) == 2
    assert "--output: " in capsys.readouterr().err


def test_a_nats_server_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["profile", "--nats", "nats://127.0.0.1:9", "--output", str(tmp_path / "t.json")]) == 2
    )
    assert "nats://127.0.0.1:9" in capsys.readouterr().err
