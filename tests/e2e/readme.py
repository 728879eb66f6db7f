"""The commands of README.md and of other pages, for the tests that run them.

Fenced blocks are taken in order. A comment `<!-- test: serves -->` before a block says that its command runs until it
is stopped; the blocks after it talk to what it serves. `<!-- test: compose -->` marks the one for test_compose.py.
A block of text that follows a command is what the command prints.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"(?:<!-- test: (?P<mark>\w+) -->\n)?```(?P<language>bash|python)\n(?P<code>.*?)```"
    r"(?:\n\n```text\n(?P<shown>.*?)```)?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    mark: str | None
    shown: str | None
    line: int


def blocks(page: str = "README.md") -> list[Block]:
    text = (ROOT / page).read_text()
    return [
        Block(**found.groupdict(), line=text[: found.start("code")].count("\n"))
        for found in _BLOCK.finditer(text)
    ]


def compose_options() -> list[str]:
    """The options that the README gives to `docker compose up`."""
    [block] = [block for block in blocks() if block.mark == "compose"]
    words = block.code.split()
    assert words[:3] == ["docker", "compose", "up"], block.code
    return words[3:]
