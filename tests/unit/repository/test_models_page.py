"""Test that docs/models.md and docs/dialects.md agree with the registries that they are made of."""

from __future__ import annotations

import pytest

import list_senses
import model_columns
from list_models import PAGE, ranks_of, ranks_section, rows_on
from motet_models.image_support import HEARING_TYPES, MODEL_TYPES
from motet_shared.reasoning import registry as reasoning_formats
from motet_shared.tool_formats import registry as tool_formats
from support.families.chat_templates import family

# Families of the templates that the tests have, by the `model_type` of the models that publish them.
TEMPLATES = {
    "qwen3": "qwen3",
    "mistral": "mistral",
    "phi": "phi3",
    "deepseek": "deepseek_v3",
    "glm": "glm4_moe",
    "granite": "granite",
    "harmony": "gpt_oss",
}
ROWS = {cells[0]: cells for cells in rows_on(PAGE.read_text())}


def names(cell: str) -> list[str]:
    return [name.strip("`") for name in cell.split(", ") if name.startswith("`")]


def test_every_dialect_belongs_to_a_served_type_and_every_format_is_listed() -> None:
    dialects = model_columns.dialects()
    assert dialects.keys() <= ROWS.keys()
    tools = {name for cells in dialects.values() for name in names(cells[0])}
    reasoning = {name for cells in dialects.values() for name in names(cells[1])}
    assert tools == set(tool_formats.NAMES)
    assert reasoning == set(reasoning_formats.NAMES)
    for model_type, cells in dialects.items():
        assert ROWS[model_type][4:6] == list(cells), "run scripts/list_models.py"


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_dialect_of_a_template_is_that_of_its_type(name: str) -> None:
    template, cells = family(name).template, ROWS[TEMPLATES[name]]
    tools = tool_formats.detect_format(template)
    assert tools is not None
    assert tools.name in names(cells[4])
    reasoning = reasoning_formats.detect_format(template)
    if reasoning is not None:
        assert reasoning.name in names(cells[5])


def test_types_that_see_and_hear_and_files_are_those_of_the_registries() -> None:
    assert {row for row, cells in ROWS.items() if cells[6] == "yes"} == MODEL_TYPES
    assert {row for row, cells in ROWS.items() if cells[7] == "yes"} == HEARING_TYPES
    with_gguf = {row for row, cells in ROWS.items() if "GGUF" in cells[3]}
    assert with_gguf == set(model_columns.GGUF_TYPES) & ROWS.keys()
    quantized = {row for row, cells in ROWS.items() if "quantized" in cells[3]}
    assert {"llama", "qwen3", "qwen3_moe", "deepseek_v3"} <= quantized


def test_types_that_rank_are_those_compared_with_sentence_transformers() -> None:
    ranking = {row: cells[8] for row, cells in ROWS.items() if cells[8]}
    assert ranking == {row: ranks_of(row) for row in ROWS if ranks_of(row)}
    assert {"bert", "qwen3"} <= ranking.keys()
    assert "\n".join(ranks_section()) in PAGE.read_text(), "run scripts/list_models.py"


def test_what_hears_speaks_and_draws_is_that_of_the_other_pages() -> None:
    text = PAGE.read_text()
    assert list_senses.written(text) == text, "run scripts/list_senses.py"
    columns = text.split(list_senses.BEGIN)[1].split("|---")[0]
    assert "| hears | speaks | draws |" in columns
