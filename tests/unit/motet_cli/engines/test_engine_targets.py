"""Engines of motet.toml and of the command line: the processes that they become, and refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from motet_cli.checkpoints import model_folders
from motet_cli.engines import environment
from motet_cli.main import parser
from motet_cli.stack_file.arguments import flag_defaults
from motet_cli.stack_file.read import read_stack_file
from motet_cli.supervision import up
from motet_cli.supervision.child import ChildSpec
from motet_shared.errors import ConfigError
from support.running.refusals import refuses

QUIET = "[settings]\n" + "".join(
    f'{name} = "none"\n' for name in ("asr", "tts", "speakers", "draw", "embed")
)
CHAIN = """
[models.tiny]
[[models.tiny.targets]]
name = "fast"
engine = "vllm"
engine_python = "{python}"
engine_args = "--dtype bfloat16"
instances = 2
[[models.tiny.targets]]
engine = "openai"
engine_url = "http://127.0.0.1:9/v1"
keep_warm = "5m"
[[models.tiny.targets]]
name = "own"
settings = {{ token_budget = 128 }}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide the path of a file, beside the folder of the only known model."""
    monkeypatch.setattr(model_folders, "model_dirs", lambda: [tmp_path])
    tiny = tmp_path / "tiny"
    tiny.mkdir()
    (tiny / "config.json").write_text('{"model_type": "llama"}')
    (tiny / "tokenizer.json").write_text("{}")
    (tiny / "model.safetensors").write_bytes(b"\0" * 1000)
    return tmp_path / "motet.toml"


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Provide an interpreter whose environment has what vLLM's host needs."""
    monkeypatch.setitem(environment.ENGINES, "vllm", {"msgspec": "msgspec"})
    return sys.executable


def options(file: Path, *argv: str) -> up.UpOptions:
    read = read_stack_file(file)
    args = parser(flag_defaults(read)).parse_args(["up", "--port", "0", *argv])
    args.stack_file = read
    return up.parse_options(args)


def value(spec: ChildSpec, flag: str) -> str:
    return spec.argv[spec.argv.index(flag) + 1]


def test_a_chain_becomes_processes_in_their_environments(file: Path, python: str) -> None:
    file.write_text(QUIET + CHAIN.format(python=python))
    stack = options(file).stack
    decode = {spec.name: spec for spec in stack.services() if spec.role == "decode"}
    assert list(decode) == [
        "decode:tiny@fast-1",
        "decode:tiny@fast-2",
        "decode:tiny@openai",
        "decode:tiny@own",
    ]
    fast = decode["decode:tiny@fast-1"]
    assert fast.argv[0] == python
    assert fast.argv[1].endswith("other_environment.py")
    assert fast.env["MOTET_ENGINE_PACKAGES"].count("motet_") == 4
    assert "--engine-args=--dtype bfloat16" in fast.argv
    ranks = [(value(spec, "--target"), value(spec, "--rank")) for spec in decode.values()]
    assert ranks == [("fast", "0"), ("fast", "0"), ("openai", "1"), ("own", "2")]
    assert "--keep-warm=5m" in decode["decode:tiny@openai"].argv
    own = decode["decode:tiny@own"]
    assert ("motet_llm" in own.argv, "--token-budget=128" in own.argv) == (True, True)
    assert stack.memory is not None
    assert "decode=tiny" in stack.expected()


def test_a_host_runs_in_another_environment_with_its_own_libraries(tmp_path: Path) -> None:
    """Only Motet's packages come from here; the interpreter has no others of this environment."""
    command = [sys.executable, "-S", *environment.host_command("")[1:], "--help"]
    packages = environment.host_variables()
    probe = "import os, sys; sys.path.insert(0, os.environ['WIRE']); import runpy; "
    script = f"{probe} sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    wire = str(Path(msgspec.__file__).parents[1])
    done = subprocess.run(
        [*command[:2], "-c", script, *command[2:]],
        env={**packages, "WIRE": wire},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "--engine-args" in done.stdout


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('[models.tiny]\nengine = "vllm"', "models.tiny.engine_python"),
        ('[models.tiny]\nengine = "openai"', "models.tiny.engine_url"),
        ('[models.tiny]\nengine_url = "http://a/v1"', "models.tiny.engine_url"),
        (
            '[models.tiny]\nengine = "openai"\nengine_url = "http://a/v1"\nload = "on demand"',
            "models.tiny.load",
        ),
        (
            '[models.tiny]\nengine = "llama.cpp"\nengine_url = "http://a"\nengine_python = "p"',
            "models.tiny.engine_python",
        ),
        ('[models.tiny]\nengine_python = "p"', "models.tiny.engine_python"),
        (
            '[models.tiny]\nengine = "llama.cpp"\nengine_python = "/nowhere"',
            "models.tiny.engine_python",
        ),
        (
            '[models.tiny]\nengine_args = "a"\n[[models.tiny.targets]]\nname = "a"',
            "models.tiny.engine_args",
        ),
        (
            '[models.tiny]\n[[models.tiny.targets]]\n[[models.tiny.targets]]\nname = "motet"',
            "models.tiny.targets[1].name",
        ),
        (
            '[models.tiny]\n[[models.tiny.targets]]\nname = "a b"',
            "models.tiny.targets[0].name",
        ),
        (
            '[models.tiny]\n[[models.tiny.targets]]\nkeep_warm = "1m"',
            "models.tiny.targets[0].keep_warm",
        ),
        ('[models.tiny]\nrole = "tts"\nengine = "vllm"', "models.tiny.engine"),
    ],
)
def test_what_cannot_be_is_named(file: Path, text: str, param: str) -> None:
    file.write_text(QUIET + text)
    with refuses(ConfigError, param):
        options(file)


def test_what_an_environment_lacks_is_named_with_the_remedy(file: Path) -> None:
    file.write_text(QUIET)
    flags = ("--llm", "tiny", "--engine", "vllm", "--engine-python", sys.executable)
    with refuses(ConfigError, "--engine-python") as caught:
        options(file, *flags)
    assert "-m pip install vllm" in caught.value.message


def test_an_adapter_reaches_vllm_and_no_other_engine(
    file: Path, python: str, tmp_path: Path
) -> None:
    file.write_text(QUIET)
    adapter = tmp_path / "tuned"
    adapter.mkdir()
    for part in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / part).write_text("{}")
    flags = ("--llm", "tiny", "--adapter", f"tuned={adapter}", "--decode", "2")
    found = options(file, *flags, "--engine", "vllm", "--engine-python", python).stack
    decode = [spec for spec in found.services() if spec.role == "decode"]
    assert [value(spec, "--adapters") for spec in decode] == [f"tuned={adapter}"] * 2
    with refuses(ConfigError, "--adapter"):
        options(file, *flags, "--engine", "openai", "--engine-url", "http://127.0.0.1:9/v1")
    with refuses(ConfigError, "--adapter-folder"):
        folder = ("--llm", "tiny", "--adapter-folder", str(tmp_path))
        options(file, *folder, "--engine", "vllm", "--engine-python", python)
