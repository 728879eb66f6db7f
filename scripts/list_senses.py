"""Write the section of docs/models.md with the models that hear, speak or draw beside language models.

.venv/bin/python scripts/list_senses.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import list_pictures
from motet_asr.models.registry import RECOGNIZERS
from motet_tts.checkpoint import FAMILIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "\n## Hears, speaks, draws\n", "\n## Refused: "

HEAD = """
## Hears, speaks, draws

Models that are no language models, by `model_type`, or by the pipeline of diffusers, each exact as its own page
describes: [recognizers.md](recognizers.md), [speech.md](speech.md), [pictures.md](pictures.md). What language models
see and hear is in the table above; a stack joins them with these ([README.md](../README.md#where-to-begin)).
`scripts/list_senses.py` writes this section.

| model | served with | hears | speaks | draws |
|---|---|---|---|---|
"""


def section() -> str:
    """Return the section, from its heading to its last row."""
    return HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in _rows())


def _rows() -> Iterator[tuple[str, str, str, str, str]]:
    for name in sorted(RECOGNIZERS):
        yield name, "`--asr`", "yes", "", ""
    for name in sorted(FAMILIES):
        yield name, "`--tts`", "", "yes", ""
    for name, row in sorted(list_pictures.exact_rows(list_pictures.PAGE.read_text()).items()):
        yield name, "`--draw`", "", "", ", ".join(row.kinds)


def written(text: str) -> str:
    """Return the text of the page with this section."""
    before = text.split(BEGIN)[0] if BEGIN in text else text.split(END)[0]
    return before + section() + END + text.split(END, 1)[1]


def main() -> None:
    """Run as a script."""
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
