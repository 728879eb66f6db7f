"""Settings: every type from flag and environment, precedence, bounds, secrets, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_shared.errors import ConfigError
from motet_shared.process.config import Bytes, Duration, ProcessConfig, load, setting
from support.running.refusals import refuses


@dataclass(frozen=True, kw_only=True)
class Sample(ProcessConfig):
    """A service for tests."""

    threads: int = setting("worker threads, 100% busy", default=2, min=1, max=64)
    rate: float = setting("share", default=0.5, min=0)
    verbose: bool = setting("say more", default=False)
    folder: Path = setting("where to look", default=Path("/tmp"))
    models: tuple[str, ...] = setting("models to serve", default=())
    sizes: list[int] = setting("sizes", default_factory=list, min=1)
    mode: Literal["fast", "exact"] = setting("how", default="fast")
    limit: int | None = setting("most", default=3)
    pool: Bytes = setting("pool size", default=1024, min=16)
    patience: Duration = setting("wait", default=1.0)
    lease: Duration | None = setting("lease", default=None)
    token: str | None = setting("a secret", default=None, secret=True)
    plain: int = 7


@dataclass(frozen=True, kw_only=True)
class Strict:
    model: str = setting("the model")
    low: int = setting("low", default=1)
    high: int = setting("high", default=2)

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ConfigError(f"low: {self.low} is above high ({self.high}); lower it", param="low")
        if self.model == "bad":
            raise ValueError("bad model")


def sample(argv: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Sample:
    return load(Sample, list(argv), env or {}, prog="sample")


def test_defaults_are_used_when_nothing_is_given() -> None:
    config = sample()
    assert config == Sample()
    assert config.nats_url == "nats://127.0.0.1:4222"
    assert config.sizes == []


TABLE: list[tuple[str, str, Any]] = [
    ("threads", "8", 8),
    ("rate", "1.25", 1.25),
    ("verbose", "yes", True),
    ("verbose", "off", False),
    ("folder", "/srv/x", Path("/srv/x")),
    ("models", "one", ("one",)),
    ("sizes", "5", [5]),
    ("mode", "exact", "exact"),
    ("limit", "none", None),
    ("limit", "9", 9),
    ("pool", "512MB", 512_000_000),
    ("pool", "64MiB", 64 << 20),
    ("pool", "1.5k", 1536),
    ("patience", "250ms", 0.25),
    ("patience", "5m", 300.0),
    ("lease", "2", 2.0),
    ("lease", "none", None),
    ("token", "s3cret", "s3cret"),
    ("plain", "8", 8),
    ("nats_url", "nats://h:1", "nats://h:1"),
    ("instance", "decode-1a", "decode-1a"),
]


@pytest.mark.parametrize(("name", "text", "value"), TABLE)
def test_flag_and_environment_give_the_same_value(name: str, text: str, value: Any) -> None:
    flag = "--" + name.replace("_", "-")
    assert getattr(sample([flag, text]), name) == value
    assert getattr(sample([f"{flag}={text}"]), name) == value
    assert getattr(sample(env={"MOTET_" + name.upper(): text}), name) == value


def test_flag_beats_environment_beats_default() -> None:
    env = {"MOTET_THREADS": "4"}
    assert sample(env=env).threads == 4
    assert sample(["--threads", "5"], env).threads == 5


def test_an_empty_variable_counts_as_not_set() -> None:
    assert sample(env={"MOTET_THREADS": "", "MOTET_TOKEN_FILE": ""}).threads == 2


def test_bool_flags_stand_alone_and_can_be_negated() -> None:
    assert sample(["--verbose"]).verbose
    assert not sample(["--no-verbose"], {"MOTET_VERBOSE": "1"}).verbose
    assert not sample(["--verbose=false"]).verbose


def test_lists_repeat_on_the_command_line_and_are_comma_separated_in_the_environment() -> None:
    assert sample(["--models", "a", "--models", "b,c"]).models == ("a", "b,c")
    assert sample(env={"MOTET_MODELS": "a, b,"}).models == ("a", "b")
    assert sample(["--sizes", "1", "--sizes", "2"]).sizes == [1, 2]


@pytest.mark.parametrize(
    ("argv", "env", "parts"),
    [
        (["--threads", "two"], {}, ["threads", "'two'", "--threads", "whole number"]),
        ([], {"MOTET_THREADS": "0"}, ["threads", "'0'", "MOTET_THREADS", "1 to 64"]),
        (["--rate", "-1"], {}, ["rate", "'-1'", "at least 0"]),
        (["--rate", "nan"], {}, ["rate", "'nan'"]),
        (["--verbose=maybe"], {}, ["verbose", "'maybe'", "true or false"]),
        (["--mode", "slow"], {}, ["mode", "'slow'", "fast, exact"]),
        (["--pool", "5 parsecs"], {}, ["pool", "'5 parsecs'", "512MB"]),
        (["--pool", "1.5"], {}, ["pool", "512MB"]),
        (["--pool", "8"], {}, ["pool", "at least 16"]),
        (["--patience", "soon"], {}, ["patience", "250ms"]),
        ([], {"MOTET_SIZES": "1,x"}, ["sizes", "'1,x'", "MOTET_SIZES"]),
        (["--sizes", "3", "--sizes", "0"], {}, ["sizes", "'3,0'", "at least 1"]),
        (["--thread", "3"], {}, ["'--thread'", "did you mean --threads?"]),
        (["stray"], {}, ["'stray'", "--help"]),
        (["--threads"], {}, ["--threads", "expected one argument"]),
        (["--instance", "a.b"], {}, ["instance", "'a.b'", "(from --instance)"]),
        (["--metrics-port", "-2"], {}, ["metrics_port", "-1 to 65535"]),
    ],
)
def test_a_wrong_value_names_field_value_source_and_remedy(
    argv: list[str], env: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        sample(argv, env)
    for part in parts:
        assert part in caught.value.message


def test_a_missing_setting_says_how_to_give_it() -> None:
    with refuses(ConfigError, "model"):
        load(Strict, [], {})


def test_post_init_is_honoured_and_the_source_is_added() -> None:
    with refuses(ConfigError, "low"):
        load(Strict, ["--model", "m"], {"MOTET_LOW": "5"})
    with refuses(ConfigError, "Strict"):
        load(Strict, ["--model", "bad"], {})


def test_secrets_come_from_files_and_are_shown_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("hush\n")
    from_env = sample(env={"MOTET_TOKEN_FILE": str(path)})
    assert from_env.token == sample(["--token-file", str(path)]).token == "hush"
    assert "hush" not in repr(from_env)
    assert sample(["--token", "louder"], {"MOTET_TOKEN_FILE": str(path)}).token == "louder"


def test_a_secret_that_cannot_be_read_or_is_given_twice_is_refused(tmp_path: Path) -> None:
    with refuses(ConfigError, "token"):
        sample(env={"MOTET_TOKEN_FILE": str(tmp_path / "absent")})
    with pytest.raises(ConfigError, match=r"--token .*--token-file"):
        sample(["--token", "a", "--token-file", "b"])


def test_a_wrong_secret_is_not_repeated_in_the_message() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Pin:
        pin: int = setting("a pin", default=0, secret=True)

    with pytest.raises(ConfigError) as caught:
        load(Pin, [], {"MOTET_PIN": "12x4"})
    assert "12x4" not in str(caught.value)


def test_help_names_every_flag_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sample(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "A service for tests.",
        "--threads",
        "[MOTET_THREADS]",
        "100% busy",
        "(default: 2)",
        "--token-file",
    ):
        assert part in text


def test_instance_ids_are_generated_from_the_role_or_taken_as_given() -> None:
    first, second = Sample().instance_id("decode"), Sample().instance_id("decode")
    assert first.startswith("decode-")
    assert first != second
    assert Sample(instance="decode-7").instance_id("decode") == "decode-7"


@given(st.integers(0, 1 << 50))
def test_sizes_round_trip_in_every_whole_unit(size: int) -> None:
    assert sample(["--pool", f"{size + 16}B"]).pool == size + 16
    assert sample(["--pool", f"{size % 1000 + 1}KiB"]).pool == (size % 1000 + 1) * 1024


@given(st.text(max_size=20))
def test_any_text_is_a_value_or_a_config_error(text: str) -> None:
    for name in ("THREADS", "POOL", "PATIENCE", "MODE", "SIZES", "LIMIT"):
        try:
            sample(env={f"MOTET_{name}": text})
        except ConfigError as error:
            assert name.lower() in error.message  # noqa: PT017
