"""motet.toml: what it says, what is wrong with it, and that flags of `motet up` override it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
from msgspec.structs import fields

from motet_cli.checkpoints import model_folders
from motet_cli.main import main, parser
from motet_cli.stack_file.arguments import find_stack_file, flag_defaults, stack_file_of
from motet_cli.stack_file.read import read_stack_file
from motet_cli.stack_file.schema import StackFile, UpSettings
from motet_cli.supervision import up
from motet_shared.errors import ConfigError
from motet_shared.messages import Offer

GOOD = """
[settings]
port = 0
asr = "none"
tts = "none"
speakers = "none"
draw = "none"
embed = "none"
vad = 0
tokenizer = 2
allowed_hosts = ["a.example"]

[on_demand]
memory = "3GiB"
max_loaded = 2
prepared = 3
keep_alive = "1m"

[roles.decode]
settings = { token_budget = 256, deterministic = true }

[models.quick]
source = "tiny"
settings = { token_budget = 128 }

[models.large]
source = "tiny"
load = "on demand"
keep_alive = "forever"
memory = "2GiB"
instances = 2

[models.voice]
source = "tiny"
role = "tts"
load = "on demand"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a file, beside a folder with the files of a checkpoint, the only known model."""
    monkeypatch.setattr(model_folders, "model_dirs", lambda: [tmp_path])
    tiny = tmp_path / "tiny"
    tiny.mkdir()
    (tiny / "config.json").write_text('{"model_type": "llama"}')
    (tiny / "tokenizer.json").write_text("{}")
    (tiny / "model.safetensors").write_bytes(b"\0" * 1000)
    path = tmp_path / "motet.toml"
    path.write_text(GOOD)
    return path


def options(file: Path, *argv: str) -> up.UpOptions:
    read = read_stack_file(file)
    args = parser(flag_defaults(read)).parse_args(["up", *argv])
    args.stack_file = read
    return up.parse_options(args)


def test_models_roles_and_settings_become_processes(file: Path) -> None:
    stack = options(file).stack
    assert [model.name for model in stack.at_start] == ["quick"]
    assert stack.models == ()  # no default model beside those of the file
    specs = {spec.name: spec for spec in stack.services()}
    assert {"gateway", "tokenizer-1", "tokenizer-2", "decode:quick"} == specs.keys()
    quick = specs["decode:quick"]
    budgets = [word for word in quick.argv if word.startswith("--token-budget")]
    assert budgets == ["--token-budget=256", "--token-budget=128"]  # the last one counts
    assert "--deterministic=true" in quick.argv
    gateway = specs["gateway"].argv
    expected = [gateway[i + 1] for i, word in enumerate(gateway) if word == "--expect"]
    assert expected == ["decode=quick", "tokenizer=large"]
    assert gateway[gateway.index("--allowed-hosts") + 1] == "a.example"
    tokenizer = specs["tokenizer-1"].argv
    assert [word.partition("=")[0] for word in tokenizer if "=/" in word] == ["quick", "large"]


def test_models_on_demand_have_their_memory_and_time(file: Path) -> None:
    stack = options(file).stack
    (large, processes), (voice, speaking) = stack.on_demand()
    assert [spec.name for spec in processes] == ["decode:large-1", "decode:large-2"]
    for spec in processes:
        assert spec.argv[spec.argv.index("--memory") + 1] == str(2 * 2**30)
        assert spec.argv[spec.argv.index("--drain-timeout") + 1] == "3600"
    assert (large.keep_alive, voice.keep_alive) == (float("inf"), 60.0)
    (spec,) = speaking
    assert (spec.role, spec.model) == ("tts", "voice")
    assert "--memory" not in spec.argv
    assert (stack.on_demand_memory, stack.max_loaded, stack.prepared) == (3 * 2**30, 2, 3)


def test_flags_override_settings(file: Path) -> None:
    stack = options(file, "--tokenizer", "1", "--llm", "tiny").stack
    assert stack.tokenizer == 1
    assert [model.name for model in stack.models] == ["tiny"]
    with pytest.raises(ConfigError) as caught:
        options(file, "--llm", "quick=tiny")
    assert caught.value.param == "--llm"


def test_every_setting_is_a_flag_of_motet_up() -> None:
    flags = vars(parser().parse_args(["up"])).keys()
    settings = {one.name for one in fields(UpSettings)}
    assert settings <= flags
    # Models have tables of their own; a file names neither another one nor a preset.
    others = {"llm", "adapter", "chat_template", "config", "preset", "command", "module"}
    assert flags - settings == others


def test_an_offer_knows_every_stage() -> None:
    assert Offer(role="decode", model="a").stage == "absent"


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("models = 3", "models"),
        ("[modelz.a]", "modelz"),
        ("[models.a]\nloads = 1", "models.a.loads"),
        ('[models.a]\nload = "later"', "models.a.load"),
        ('[models.a]\nrole = "judge"', "models.a.role"),
        ("[models.a]\ninstances = 0", "models.a.instances"),
        ('[models.a]\nmemory = "much"', "models.a.memory"),
        ('[models.a]\nload = "on demand"\nkeep_alive = "ever"', "models.a.keep_alive"),
        ('[models.a]\nload = "on demand"\nkeep_alive = -1', "models.a.keep_alive"),
        ('[models.a]\nkeep_alive = "5m"', "models.a.keep_alive"),
        ('[models.a]\nrole = "tts"\ninstances = 2', "models.a.instances"),
        ('[models.a]\nengine = "other"', "models.a.engine"),
        ('[models."a=b"]', "models.a=b"),
        ("[models.a]\nsettings = { a = {} }", "models.a.settings[...]"),
        ("[settings]\nport = 70000", "settings.port"),
        ('[settings]\nlog_format = "xml"', "settings.log_format"),
        ("[on_demand]\nmax_loaded = -1", "on_demand.max_loaded"),
        ('[on_demand]\nkeep_alive = "soon"', "on_demand.keep_alive"),
        ("[roles.cook]", "roles.cook"),
        ("[models", "--config"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, param: str) -> None:
    path = tmp_path / "motet.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_stack_file(path)
    assert caught.value.param == param
    assert param.rpartition(".")[2].partition("[")[0] in caught.value.message


@pytest.mark.parametrize(
    ("table", "param"),
    [
        ('source = "nowhere"', "models.a.source"),
        ('source = "tiny"\nrole = "draw"', "models.a.source"),
        ('source = "tiny"\nchat_template = "/nowhere"', "models.a.chat_template"),
    ],
)
def test_models_that_are_not_there_are_named(file: Path, table: str, param: str) -> None:
    file.write_text(f"[models.a]\n{table}")
    with pytest.raises(ConfigError) as caught:
        options(file)
    assert caught.value.param == param


def test_the_file_of_the_folder_is_read_unless_none_is_wanted(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    assert find_stack_file(None) == Path("motet.toml")
    assert find_stack_file("none") is None
    file.write_text("[models.a]\nload = 1")
    assert main(["up"]) == 2
    assert "models.a.load" in capsys.readouterr().err


def test_a_command_line_without_a_file_has_an_empty_one() -> None:
    assert stack_file_of(Namespace()) == StackFile()
