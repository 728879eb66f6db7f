"""Test that every setting, option and command in a remedy of `motet doctor` exists."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest

from motet_cli.main import parser
from motet_doctor import diagnose
from motet_doctor.rules import NAMES
from motet_gateway.config import GatewayConfig
from motet_llm.config import DecodeConfig
from motet_shared.process.config import load
from motet_tokenizer.config import TokenizerConfig
from support.services.doctor_cases import CASES, window

NEEDED = {DecodeConfig: ["--model", "m"], TokenizerConfig: ["--model", "m"], GatewayConfig: []}
SETTINGS = {
    f"MOTET_{field.name.upper()}" for config in NEEDED for field in dataclasses.fields(config)
}


def remedies() -> dict[str, str]:
    return {name: diagnose(window(*CASES[name][0]))[0].knob for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_settings_and_options_exist(name: str) -> None:
    remedy = remedies()[name]
    assert set(re.findall(r"MOTET_[A-Z_]+", remedy)) <= SETTINGS
    for option, value in re.findall(r"(?<!up )(--[a-z-]+) ([0-9A-Za-z.]+)", remedy):
        if option.startswith("--sort"):  # of ps
            continue
        taken = [
            config
            for config in NEEDED
            if f"MOTET_{option[2:].replace('-', '_').upper()}" in _of(config)
        ]
        assert taken, f"{option} is no setting of {name}'s service"
        if value != "N":
            load(taken[0], [*NEEDED[taken[0]], option, value])


def _of(config: type) -> set[str]:
    return {f"MOTET_{field.name.upper()}" for field in dataclasses.fields(config)}


def test_commands_exist() -> None:
    commands = [
        found
        for remedy in remedies().values()
        for found in re.findall(r"motet ((?:scale|up|restart)[^;:,)(]*)", remedy)
    ]
    assert len(commands) >= 4
    for command in commands:
        parser().parse_args(shlex.split(command))
