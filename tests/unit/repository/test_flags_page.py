"""docs/flags.md names flags of ours that exist, and docs/stack-file.md fields and stages that do."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import fields

from motet_cli.main import parser
from motet_cli.on_demand.residency import Stage
from motet_cli.stack_file.read import read_stack_file
from motet_cli.stack_file.schema import ModelTable, OnDemandTable
from motet_gateway.config import GatewayConfig
from motet_llm.config import DecodeConfig
from motet_shared.process.config import ProcessConfig
from motet_tokenizer.config import TokenizerConfig

ROOT = Path(__file__).parents[3]
FLAGS, STACK = ((ROOT / "docs" / name).read_text() for name in ("flags.md", "stack-file.md"))
CONFIGS: dict[str, type[ProcessConfig]] = {
    "decode": DecodeConfig,
    "tokenizer": TokenizerConfig,
    "gateway": GatewayConfig,
}
OURS = re.compile(r"(\w+) `(?:--)?([\w-]+)`")


def rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the table whose header row begins with `heading`."""
    table = text[text.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def known() -> dict[str, set[str]]:
    """Return the flags of each of our programs, and the fields of motet.toml, without dashes."""
    top = parser()
    (commands,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    up = {flag.lstrip("-") for flag in commands.choices["up"]._option_string_actions}
    found = {
        role: {one.name.replace("_", "-") for one in dataclasses.fields(config)}
        for role, config in CONFIGS.items()
    }
    toml = {one.name for table in (ModelTable, OnDemandTable) for one in fields(table)}
    return found | {"up": up, "toml": toml}


@pytest.mark.parametrize("row", rows(FLAGS, "vLLM"), ids=lambda row: row[0] or row[1])
def test_our_flags_exist(row: list[str]) -> None:
    theirs, ours = row[0] + row[1], OURS.findall(row[2])
    assert "`" in theirs
    assert ours or row[3]  # without a flag, the last column says what there is
    assert row[2].count("`") == 2 * len(ours)
    for program, flag in ours:
        assert flag in known()[program], (program, flag)


def test_fields_and_stages_are_those_of_the_code() -> None:
    cells = {re.findall(r"`(\w+)`", row[0])[0] for row in rows(STACK, "field of `[models.NAME]`")}
    assert cells == {one.name for one in fields(ModelTable)}
    for one in fields(OnDemandTable):
        assert f"`{one.name}`" in STACK
    stages = {word for row in rows(STACK, "stage") for word in re.findall(r"`(\w+)`", row[0])}
    assert stages == set(get_args(Stage))


def test_the_example_is_a_valid_file(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", STACK, re.DOTALL)
    path = tmp_path / "motet.toml"
    path.write_text(example)
    file = read_stack_file(path)
    assert {name for name, model in file.models.items() if model.load == "on demand"} == {
        "coder",
        "reader",
    }
