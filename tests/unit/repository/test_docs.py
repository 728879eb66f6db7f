"""The commands that docs/operate.md shows are there: each is parsed, with its options, and files it names exist."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
import yaml

from motet_cli.main import parser

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/operate.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


def lines() -> list[str]:
    """Commands of all blocks, one each; continued lines are joined, comments and what pipes do with output left out."""
    joined = "".join(BLOCKS).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


MOTET = [line for line in lines() if re.match(r"(\.venv/bin/)?motet ", line)]


@pytest.mark.parametrize("line", MOTET)
def test_the_command_is_one_of_ours(line: str) -> None:
    words = shlex.split(line, comments=True)
    words = words[1 : words.index("|")] if "|" in words else words[1:]
    parser().parse_args([word for word in words if word != "&"])


def test_a_day_has_all_its_parts() -> None:
    """Every command that an operator has, and no heading missing."""
    used = {shlex.split(line, comments=True)[1] for line in MOTET}
    assert {"up", "models", "scale", "restart", "top", "trace", "doctor", "plan", "bench"} <= used
    headings = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert headings == ["Deploy", "Scale", "Roll", "Diagnose", "Plan"]


def test_commands_that_are_not_there_would_be_noticed() -> None:
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        parser().parse_args(["doctor", "--windows", "3"])


def test_services_and_files_exist() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    compose = [line for line in lines() if line.startswith("docker compose ")]
    assert compose
    for line in compose:
        assert set(re.findall(r"--scale (\w+)=", line)) <= services.keys()
        assert set(re.findall(r"--build (\w+)$", line)) <= services.keys()
    for path in re.findall(r"\]\((?!http)([^)#]+)", PAGE):
        assert (ROOT / "docs" / path).exists(), path
    for path in re.findall(r"\b(?:deploy|services)/[\w./-]+", "\n".join(lines())):
        assert (ROOT / path).exists(), path


def test_it_is_linked() -> None:
    for page in ("docs/scale.md", "docs/restart.md", "services/motet_gateway/README.md"):
        assert "operate.md" in (ROOT / page).read_text(), page
