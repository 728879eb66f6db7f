"""Write docs/models.md: which models are served, by `model_type`, with what.

.venv/bin/python scripts/list_models.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.logging import set_verbosity_error

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import list_senses  # noqa: E402
import model_columns  # noqa: E402
from motet_llm.models import mixers, support  # noqa: E402
from motet_llm.models.recurrent import Mixer  # noqa: E402
from motet_llm.weights import checkpoint  # noqa: E402
from motet_models.image_support import HEARING_TYPES  # noqa: E402
from motet_models.image_support import MODEL_TYPES as READ_IMAGES  # noqa: E402
from motet_shared.errors import ConfigError  # noqa: E402
from support.families import composites, sights  # noqa: E402
from support.families import language_families as families  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
MIXERS = {
    "Mamba1": "Mamba",
    "Mamba2": "Mamba-2",
    "ZambaMamba": "Mamba",
    "ShortConv": "short convolutions",
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

HEAD = """# Models

Which language models are served, by the `model_type` of their config.json, with what. [hub.md](hub.md) describes how
a model is named and downloaded.

## Served: {count}

Each is *exact*: on a tiny model of the class with random float32 weights, greedy tokens equal those of
`transformers.generate` and log-probabilities differ by at most 1e-4, whether prompts are chunked, preempted, moved
or read from the prefix cache (`tests/unit/motet_llm/engine/test_llm_exactness.py`, `test_llm_composites.py`,
`tests/unit/motet_encoder/test_vlm_engine.py`). Sequences may be as long as the checkpoint's context, also with rotary
embeddings that scale with the length of a sequence (`longrope`, dynamic NTK), YaRN, Llama 4's chunks and the
temperatures of its layers without positions.

* **Parts**: what the model has beside full attention and dense layers.
* **Formats** of checkpoints, beside safetensors of float32, bfloat16 and float16, which all have. *quantized*:
  {quantized}; *mxfp4*; *GGUF*: one file, with or without a folder.
  [techniques.md](techniques.md#checkpoints-that-are-quantized-already) has the details.
* **Tools, reasoning**: the formats that published checkpoints of the type write, which are detected from the chat
  template; [dialects.md](dialects.md) describes them. Without a format `tools` are refused.
* **Sees, hears**: *yes*: an encoder instance encodes pictures or sound, found from transformers' own processor and
  `get_image_features` (`services/motet_encoder/processed.py`) or by a module there. Prompts and greedy tokens with one,
  several and none equal those of transformers' processor and `generate`
  (`tests/unit/motet_encoder/test_vlm_families.py`, `test_hearing_families.py`, `test_encoder_video.py`). *as text*:
  the checkpoint is served without its towers (encoders of pictures, video or sound), and its language model must give
  the logits of the whole class when it is loaded.
* **Ranks** (`motet up --rank`): how a model of the type scores documents for a query: *pairs* by a class for sequence
  classification, *yes or no* by the language model's next token, *late interaction* by a vector of each token. The
  [table below](#ranks) has the classes.

Composite types that are not listed are tried when they are loaded, and refused with the reason.
`scripts/list_models.py` writes this page from the code's registries and from what it finds on tiny models; a test
compares the two.
"""
REFUSED = """
## Refused: {count}

These classes of transformers {version} are refused when they are loaded, with the reason given here. It follows
from the computation of the model's code (`services/motet_llm/models/support.py`), not from its name.

| `model_type` | class | reason |
|---|---|---|"""

RANKS = """
## Ranks

Classes whose scores are within 1e-4 of sentence-transformers' (`tests/unit/motet_embedding/test_rankers.py`); embedding
models rank by the cosine of their vectors. Other `*ForSequenceClassification` with one label, and other language models
with *yes* and *no* among their tokens, are tried when they are loaded. [ranking.md](ranking.md) has the routes.

| `model_type` | class | by |
|---|---|---|"""

REFUSED_PICTURES = """
## Refused with pictures

Other classes of transformers that read pictures beside text, and why their pictures are refused.

| `model_type` | class | reason |
|---|---|---|"""

REFUSED_SOUND = """
## Refused with sound

Other classes of transformers that hear beside text, and why their sound is refused.

| `model_type` | class | reason |
|---|---|---|"""


@dataclass(frozen=True, slots=True)
class Row:
    """Hold what is known of a served class.

    parts, formats: text; sees: `yes`, or `as text`; hears: `yes`, or empty.
    """

    model_type: str
    class_name: str
    parts: str
    formats: str
    sees: str = ""
    hears: str = ""


def outcome(name: str) -> tuple[str, bool]:
    """Return the parts of a class and True if it is exact, else the refusal and False."""
    config = families.variant_config(name)
    config.architectures = [families.class_of(name).__name__]
    try:
        checkpoint.check_config(config)
        model = families.random_model(name)
        mixers.install_recurrent(model)
        layers = support.examine(model, checkpoint.exact_range(config) or families.CONTEXT)
        mixers.install_latent(model)
    except ConfigError as error:
        return str(error).split(" is not supported: ")[-1], False
    return ", ".join(_parts(model, layers)), True


def _parts(model: PreTrainedModel, layers: dict[int, support.LayerProbe]) -> Iterator[str]:
    config = model.config
    windows = [layer.reach.window for layer in layers.values()]
    if any(windows):
        yield "window" if all(windows) else "window in some layers"
    if any(layer.reach.chunk for layer in layers.values()):
        yield "chunks in some layers"
    if any(layer.softcap for layer in layers.values()):
        yield "soft-capped logits"
    if any(layer.sinks_H is not None for layer in layers.values()):
        yield "sinks"
    if any(hasattr(module, "kv_b_proj") for module in model.modules()):
        yield "latent attention (MLA)"
    kinds = {type(module).__name__ for module in model.modules() if isinstance(module, Mixer)}
    yield from sorted({MIXERS.get(kind, "gated delta rule") for kind in kinds})
    if (
        any((getattr(config, field, None) or 0) > 1 for field in EXPERTS)
        or config.model_type == "dbrx"
    ):
        yield "experts"
    if getattr(config, "num_kv_shared_layers", 0):
        yield "layers that share keys and values"
    tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    if any("position" in name or "wpe" in name for name in tables):
        yield "learned positions"


def page() -> str:
    """Return the page."""
    results = {name: outcome(name) for name in _text_classes()}
    served = [
        Row(_type(name), name, text, model_columns.formats_of(name, _type(name)))
        for name, (text, is_exact) in results.items()
        if is_exact
    ]
    served = sorted([*served, *_composites()], key=lambda row: row.model_type)
    quantized = ", ".join(f"`{method}`" for method in model_columns.QUANTIZED)
    lines = [HEAD.format(count=len(served), quantized=quantized), *_served_table(served)]
    lines += ["\nConfigs of these classes that select other code, also exact: "]
    lines[-1] += "; ".join(sorted(families.VARIANTS)) + "."
    lines += ranks_section()
    lines += list_senses.section().rstrip("\n").split("\n")
    refused = [(_type(name), name, results[name][0]) for name in results if not results[name][1]]
    refused += [(name, _composite_class(name), _refusal(name)) for name in composites.REFUSED]
    lines += [REFUSED.format(count=len(refused), version=transformers.__version__)]
    lines += ["| " + " | ".join(cells) + " |" for cells in sorted(refused)]
    lines += [REFUSED_PICTURES]
    lines += ["| " + " | ".join(cells) + " |" for cells in sights.rows() if cells[2] != "exact"]
    lines += [REFUSED_SOUND]
    lines += ["| " + " | ".join(row) + " |" for row in sights.sound_rows() if row[2] != "exact"]
    return "\n".join(lines) + "\n"


def _served_table(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of the table of served classes."""
    dialects = model_columns.dialects()
    yield "| `model_type` | class | parts | formats | tools | reasoning | sees | hears | ranks |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        tools, reasoning = dialects.get(row.model_type, ("", ""))
        cells = (
            row.model_type,
            row.class_name,
            row.parts,
            row.formats,
            tools,
            reasoning,
            row.sees,
            row.hears,
            ranks_of(row.model_type),
        )
        yield "| " + " | ".join(cells) + " |"


def ranks_of(model_type: str) -> str:
    """Return how models of a type rank; empty if none does."""
    return ", ".join(how for _, how in model_columns.rankers().get(model_type, ()))


def ranks_section() -> list[str]:
    """Return the lines of the table of rankers."""
    rows = [
        f"| {model_type} | {name} | {how} |"
        for model_type, found in model_columns.rankers().items()
        for name, how in found
    ]
    return [RANKS, *rows]


def _text_classes() -> list[str]:
    """Return the causal classes without towers."""
    classes = families.causal_classes()
    plain = [name for name, one in classes.items() if not families.is_composite(one.config_class)]
    return sorted(plain, key=_type)


def _composites() -> Iterator[Row]:
    """Yield rows of composite checkpoints: those with pictures, and those tried as text."""
    classes = composites.composite_classes()
    for name in sorted({*READ_IMAGES, *HEARING_TYPES, *composites.SERVED}):
        part = f"language model: {classes[name][0]().get_text_config().model_type}"
        sees = "yes" if name in READ_IMAGES else "as text"
        hears = "yes" if name in HEARING_TYPES else ""
        yield Row(name, _composite_class(name), part, "", sees, hears)


def _composite_class(name: str) -> str:
    return composites.composite_classes()[name][1].__name__


def _refusal(name: str) -> str:
    config_class, model_class = composites.composite_classes()[name]
    config = config_class()
    config.architectures = [model_class.__name__]
    try:
        checkpoint.check_config(config)
    except ConfigError as error:
        return str(error).split(" is not supported: ")[-1]
    raise RuntimeError(f"{name} is not refused; move it to composites.SERVED")


def rows_on(text: str) -> list[list[str]]:
    """Return the cells of the page's table of served classes."""
    table = text.split("| `model_type` | class | parts")[1].split("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]


def exact_on(text: str) -> list[str]:
    """Return the classes of text models that the page lists as served."""
    return [cells[1] for cells in rows_on(text) if not cells[6]]


def _type(name: str) -> str:
    return families.class_of(name).config_class.model_type


def main() -> None:
    """Run as a script."""
    set_verbosity_error()
    torch.set_num_threads(1)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
