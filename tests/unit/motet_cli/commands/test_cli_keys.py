"""Test `motet keys`: it edits a tenants file that people also edit, and keeps their text."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from motet_cli.main import main
from motet_shared.tenants import PREFIX, digest, load_tenants

WRITTEN = """# ours
[tenants.acme]
requests_per_minute = 5 # few

[[keys]]
# the first one
tenant = "acme"
sha256 = "{key}"

# zeta has no key
[tenants.zeta]
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOTET_TENANTS_FILE", str(tmp_path / "tenants.toml"))
    return tmp_path / "tenants.toml"


def create_key(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["keys", "new", *argv]) == 0
    return capsys.readouterr().out.strip()


def test_a_key_is_printed_once_and_stored_as_its_digest(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = create_key(capsys, "acme", "--note", 'the "build" farm')
    assert key.startswith(PREFIX)
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (known,) = load_tenants(path).keys
    assert (known.tenant, known.sha256, known.note) == ("acme", digest(key), 'the "build" farm')
    assert main(["keys", "list"]) == 0
    listed = capsys.readouterr().out
    assert known.id in listed
    assert "build" in listed
    assert key not in listed


def test_text_written_by_hand_is_kept(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(WRITTEN.format(key=digest("old")))
    path.chmod(0o640)
    before = path.read_text()
    key = create_key(capsys, "acme")
    assert path.read_text().startswith(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [k.sha256 for k in load_tenants(path).keys] == [digest("old"), digest(key)]
    assert main(["keys", "revoke", digest(key)[:12]]) == 0
    assert path.read_text() == before + "\n"
    assert main(["keys", "revoke", digest("old")[:6]]) == 0
    text = path.read_text()
    assert load_tenants(path).keys == ()
    assert "# ours" in text
    assert "# few" in text
    assert "# zeta has no key" in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["new", "Acme"], "Acme"),
        (["new", "default"], "--api-key-file"),
        (["revoke", "ffffffff"], "ID: 'ffffffff'"),
        (["revoke", ""], "ID: ''"),
        (["list", "missing"], "TENANT: 'missing'"),
    ],
)
def test_refusals_change_nothing(
    path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    path.write_text(WRITTEN.format(key=digest("old")))
    before = path.read_text()
    assert main(["keys", *argv]) == 2
    assert words in capsys.readouterr().err
    assert path.read_text() == before


def test_a_malformed_file_is_rejected_with_its_line(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text("[tenants.acme]\nfoo = 1\n")
    assert main(["keys", "new", "acme"]) == 2
    assert "line 2" in capsys.readouterr().err
    path.write_text(f'[tenants.acme]\n[[keys]]\ntenant = "acme"\n"sha256" = "{digest("a")}"\n')
    assert main(["keys", "revoke", digest("a")]) == 2
    assert digest("a")[:8] in capsys.readouterr().err


def test_a_missing_file_option_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("MOTET_TENANTS_FILE", raising=False)
    assert main(["keys", "list"]) == 2
    assert "MOTET_TENANTS_FILE" in capsys.readouterr().err
    assert main(["keys", "new", "acme", "--tenants-file", str(tmp_path / "no" / "t.toml")]) == 2
    assert str(tmp_path / "no") in capsys.readouterr().err


def test_concurrent_edits_lose_no_key(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda _: main(["keys", "new", "acme"]), range(16)))
    assert codes == [0] * 16
    assert len(load_tenants(path).keys) == 16
