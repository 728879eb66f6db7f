"""Writes docs/families.md: what comes of every causal language model class of transformers, tried on tiny models.

.venv/bin/python scripts/list_families.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.logging import set_verbosity_error

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from motet_llm.models import mixers, support  # noqa: E402
from motet_llm.models.recurrent import Mixer  # noqa: E402
from motet_llm.weights import checkpoint  # noqa: E402
from motet_shared.errors import ConfigError  # noqa: E402
from support import families  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
MIXERS = {
    "Mamba1": "Mamba",
    "Mamba2": "Mamba-2",
    "ZambaMamba": "Mamba",
    "ShortConv": "short convolutions",
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

HEAD = """# Model families

What the engine makes of every class of transformers {version} that reads a text forward and has a language model's
head. *Exact* means: on a tiny model of the class with random float32 weights, greedy tokens are those of
`transformers.generate` and log-probabilities within 1e-4 of its own, however prompts are cut into chunks, preempted,
moved or found in the prefix cache (`tests/unit/motet_llm/test_llm_exactness.py`). Everything else is refused when it
is loaded, with the reason given here: found from what the model's code does (`services/motet_llm/models/support.py`),
not from its name.

Sequences may be as long as a checkpoint was trained for. That includes rotary embeddings that scale with the length of
a sequence (`longrope`, dynamic NTK; `services/motet_llm/attention/sequence_rope.py` says what they are compared with),
YaRN, Llama 4's chunks and the temperatures of its layers without positions.

Checkpoints that see are served with pictures, and as exactly (`tests/unit/motet_vision/test_vlm_engine.py`), if they
are of LLaVA, Qwen2.5-VL, Qwen3-VL, SmolVLM or Idefics3: the engine reads their language model,
`services/motet_vision` the rest.

`scripts/list_families.py` writes this page; a test compares the two.
"""


def outcome(name: str) -> tuple[str, bool]:
    """What is special about a class or variant and exact nevertheless, and True; or why it is refused, and False."""
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
    return ", ".join(_features(model, layers)), True


def _features(model: PreTrainedModel, layers: dict[int, support.LayerProbe]) -> Iterator[str]:
    config = model.config
    windows = [seen.reach.window for seen in layers.values()]
    if any(windows):
        yield "window" if all(windows) else "window in some layers"
    if any(seen.reach.chunk for seen in layers.values()):
        yield "chunks in some layers"
    if any(seen.softcap for seen in layers.values()):
        yield "soft-capped logits"
    if any(seen.sinks_H is not None for seen in layers.values()):
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
    results = {name: outcome(name) for name in sorted(families.causal_classes(), key=_type)}
    exact = {name: text for name, (text, is_exact) in results.items() if is_exact}
    lines = [HEAD.format(version=transformers.__version__), f"## Exact: {len(exact)}\n"]
    lines += ["| `model_type` | class | exact with |", "|---|---|---|"]
    lines += [f"| {_type(name)} | {name} | {text} |" for name, text in exact.items()]
    lines += ["\nConfigs of these classes that choose other code, exact as well: "]
    lines[-1] += "; ".join(sorted(families.VARIANTS)) + "."
    lines += [
        f"\n## Refused: {len(results) - len(exact)}\n",
        "| `model_type` | class | reason |",
        "|---|---|---|",
    ]
    lines += [
        f"| {_type(name)} | {name} | {results[name][0]} |" for name in results if name not in exact
    ]
    return "\n".join(lines) + "\n"


def exact_on(text: str) -> list[str]:
    """The classes that the page calls exact."""
    table = text.split("## Exact")[1].split("## Refused")[0]
    return [
        row.split("|")[2].strip()
        for row in table.splitlines()
        if row.startswith("| ") and "`" not in row[:4]
    ]


def _type(name: str) -> str:
    return families.class_of(name).config_class.model_type


def main() -> None:
    set_verbosity_error()
    torch.set_num_threads(1)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
