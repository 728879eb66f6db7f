"""`motet connect`: configurations of clients, printed or written, with a key made for them."""

from __future__ import annotations

import json
import stat
import tomllib
from pathlib import Path

import pytest
import yaml

from motet_cli.commands.connect import CLIENTS
from motet_cli.main import main
from motet_shared.tenants import digest, load_tenants

URL = "http://127.0.0.1:9"
ARGV = ("--url", URL, "--model", "pocket-chat")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MOTET_API_KEY", raising=False)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], client: str, *argv: str) -> str:
    assert main(["connect", client, *ARGV, *argv]) == 0
    return capsys.readouterr().out


def test_claude_code(capsys: pytest.CaptureFixture[str]) -> None:
    env = json.loads(printed(capsys, "claude-code"))["env"]
    assert env["ANTHROPIC_BASE_URL"] == URL
    assert env["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert {value for name, value in env.items() if name.endswith("MODEL")} == {"pocket-chat"}


def test_codex(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_API_KEY", "sk-motet-x")
    text, _, exported = printed(capsys, "codex").partition("export ")
    config = tomllib.loads(text)
    assert (config["model"], config["model_provider"]) == ("pocket-chat", "motet")
    provider = config["model_providers"]["motet"]
    assert (provider["base_url"], provider["wire_api"]) == (f"{URL}/v1", "responses")
    assert exported.strip() == f"{provider['env_key']}=sk-motet-x"


def test_opencode(capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads(printed(capsys, "opencode"))
    assert config["model"] == "motet/pocket-chat"
    assert config["provider"]["motet"]["options"]["baseURL"] == f"{URL}/v1"
    assert config["provider"]["motet"]["models"].keys() == {"pocket-chat"}


def test_continue(capsys: pytest.CaptureFixture[str]) -> None:
    (model,) = yaml.safe_load(printed(capsys, "continue"))["models"]
    assert (model["provider"], model["model"]) == ("openai", "pocket-chat")
    assert model["apiBase"] == f"{URL}/v1"


def test_openai_agents(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "openai-agents").splitlines()
    variables = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    assert variables["OPENAI_BASE_URL"] == f"{URL}/v1"
    assert variables["OPENAI_DEFAULT_MODEL"] == "pocket-chat"


def test_a_key_is_made_for_the_client(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tenants = home / "tenants.toml"
    more = ("--tenant", "anna", "--tenants-file", str(tenants))
    key = json.loads(printed(capsys, "claude-code", *more))["env"]["ANTHROPIC_AUTH_TOKEN"]
    (known,) = load_tenants(tenants).keys
    assert (known.tenant, known.sha256) == ("anna", digest(key))
    assert "claude-code" in known.note


@pytest.mark.parametrize("client", [name for name, client in CLIENTS.items() if client.file])
def test_files_are_written(home: Path, capsys: pytest.CaptureFixture[str], client: str) -> None:
    path = home / CLIENTS[client].file
    printed(capsys, client, "--write")
    assert "pocket-chat" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_a_json_file_has_is_kept(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / CLIENTS["claude-code"].file
    path.parent.mkdir()
    path.write_text('{"theme": "dark", "env": {"FOO": "1", "ANTHROPIC_MODEL": "old"}}')
    printed(capsys, "claude-code", "--write")
    found = json.loads(path.read_text())
    assert (found["theme"], found["env"]["FOO"]) == ("dark", "1")
    assert found["env"]["ANTHROPIC_MODEL"] == "pocket-chat"


@pytest.mark.parametrize(
    ("client", "text"), [("codex", "model = 'x'\n"), ("opencode", "[]"), ("opencode", "{")]
)
def test_files_that_cannot_be_merged_stay(
    home: Path, capsys: pytest.CaptureFixture[str], client: str, text: str
) -> None:
    path = home / CLIENTS[client].file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert main(["connect", client, *ARGV, "--write"]) == 2
    assert "--write" in capsys.readouterr().err
    assert path.read_text() == text


def test_variables_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["connect", "openai-agents", *ARGV, "--write"]) == 2
    assert "--write" in capsys.readouterr().err
