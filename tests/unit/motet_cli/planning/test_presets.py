"""Presets of `motet up` and `motet plan`: one table, its flags, and the README's copy of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from motet_cli.main import main, up_arguments
from motet_cli.stack_file.presets import PRESETS
from motet_shared.errors import ConfigError

README = Path(__file__).parents[4] / "README.md"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_stands_for_flags(name: str) -> None:
    args, preset = up_arguments(["--config", "none", "--preset", name]), PRESETS[name]
    assert args.llm == [preset.llm]
    named = {model.flag: model.name for model in preset.models}
    for flag in ("asr", "tts", "draw", "embed", "rank"):
        assert getattr(args, flag) == named.get(flag, "none")


def test_flags_override_the_file_which_overrides_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "motet.toml"
    file.write_text('[settings]\ntts = "of-the-file"\nasr = "of-the-file"\n')
    flags = ["--config", str(file), "--preset", "assistant", "--asr", "given", "--llm", "mine"]
    args = up_arguments(flags)
    assert (args.llm, args.asr, args.tts, args.draw) == (["mine"], "given", "of-the-file", "none")


def test_an_unknown_preset_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as refused:
        up_arguments(["--preset", "nobody"])
    assert refused.value.param == "--preset"


@pytest.mark.parametrize("command", ["up", "plan"])
def test_they_are_listed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--preset"]) == 0
    shown = capsys.readouterr().out
    for name, preset in PRESETS.items():
        assert name in shown
        assert all(model.name in shown and model.memory in shown for model in preset.models)


def test_the_readme_has_the_same_table() -> None:
    text = README.read_text()
    for preset in PRESETS.values():
        for model in preset.models:
            size = f"{model.parameters} M, {model.download} | {model.memory}"
            row = f"| {model.sense} | `{model.name}` | {model.licence} | {size} |"
            assert row in text, row
