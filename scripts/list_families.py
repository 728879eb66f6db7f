"""Write docs/families.md: the support of each causal language model class of transformers.

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
from motet_models.image_support import HEARING_TYPES  # noqa: E402
from motet_shared.errors import ConfigError  # noqa: E402
from support import composites, families, sights  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
MIXERS = {
    "Mamba1": "Mamba",
    "Mamba2": "Mamba-2",
    "ZambaMamba": "Mamba",
    "ShortConv": "short convolutions",
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

HEAD = """# Model families

The support of each class of transformers {version} that is a causal language model. *Exact* means: on a tiny model
of the class with random float32 weights, greedy tokens equal those of `transformers.generate` and log-probabilities
differ by at most 1e-4, whether prompts are chunked, preempted, moved or read from the prefix cache
(`tests/unit/motet_llm/test_llm_exactness.py`). All other classes are refused when they are loaded, with the reason
given here. It follows from the computation of the model's code (`services/motet_llm/models/support.py`), not from
its name.

Sequences may be as long as the checkpoint's context. That includes rotary embeddings that scale with the length of
a sequence (`longrope`, dynamic NTK; see `services/motet_llm/attention/sequence_rope.py`),
YaRN, Llama 4's chunks and the temperatures of its layers without positions.

Checkpoints with towers are served with pictures where the last table says so: the engine loads their language
model, `services/motet_vision` their vision tower. The other composite checkpoints are served as text.

`scripts/list_families.py` writes this page; a test compares the two.
"""

COMPOSITES = """## Composite checkpoints

A checkpoint of a language model with towers (encoders of pictures, video or sound) is served as text, whether or not
its processor's files are there. The tensors are named by the class's own conversions, the towers are not loaded, and
the language model must give the logits of the whole class when it is loaded. These families are compared with
`generate` (`tests/unit/motet_llm/test_llm_composites.py`); others are tried when they are loaded, and refused with the
reason.
"""

SIGHTS = """
## Pictures

Prompts and greedy tokens with one picture, with several and with none equal those of transformers' own processor and
`generate` (`tests/unit/motet_vision/test_vlm_families.py`, `test_vlm_engine.py`); Qwen's videos are compared too
(`test_vision_video.py`). A family is found from its processor and its `get_image_features`
(`services/motet_vision/processed.py`); those that need more have a module there. All other classes are refused with
pictures, for this reason.

Sound is heard by {hearing} (`test_hearing_families.py`).

| `model_type` | class | pictures |
|---|---|---|"""


def outcome(name: str) -> tuple[str, bool]:
    """Return the features of a class and True if it is exact, else the refusal and False."""
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
    exact = {name: text for name, (text, is_exact) in results.items() if is_exact}
    lines = [HEAD.format(version=transformers.__version__), f"## Exact: {len(exact)}\n"]
    lines += ["| `model_type` | class | exact with |", "|---|---|---|"]
    lines += [f"| {_type(name)} | {name} | {text} |" for name, text in exact.items()]
    lines += ["\nConfigs of these classes that select other code, also exact: "]
    lines[-1] += "; ".join(sorted(families.VARIANTS)) + "."
    lines += [
        f"\n## Refused: {len(results) - len(exact)}\n",
        "| `model_type` | class | reason |",
        "|---|---|---|",
    ]
    lines += [
        f"| {_type(name)} | {name} | {results[name][0]} |" for name in results if name not in exact
    ]
    sight = [f"| {name} | {model} | {result} |" for name, model, result in sights.rows()]
    return (
        "\n".join(
            [
                *lines,
                *_composite_lines(),
                SIGHTS.format(hearing=", ".join(sorted(HEARING_TYPES))),
                *sight,
            ]
        )
        + "\n"
    )


def _text_classes() -> list[str]:
    """Return the causal classes without towers."""
    classes = families.causal_classes()
    plain = [name for name, one in classes.items() if not families.is_composite(one.config_class)]
    return sorted(plain, key=_type)


def _composite_lines() -> Iterator[str]:
    """Yield the lines of the section about composite checkpoints."""
    yield "\n" + COMPOSITES
    yield "| `model_type` | class | as text |\n|---|---|---|"
    classes = composites.composite_classes()
    for name in composites.SERVED:
        yield f"| {name} | {classes[name][1].__name__} | exact |"
    for name in composites.REFUSED:
        yield f"| {name} | {classes[name][1].__name__} | {_refusal(name)} |"


def _refusal(name: str) -> str:
    config_class, model_class = composites.composite_classes()[name]
    config = config_class()
    config.architectures = [model_class.__name__]
    try:
        checkpoint.check_config(config)
    except ConfigError as error:
        return str(error).split(" is not supported: ")[-1]
    raise RuntimeError(f"{name} is not refused; move it to composites.SERVED")


def exact_on(text: str) -> list[str]:
    """Return the classes that the page lists as exact."""
    table = text.split("## Exact")[1].split("## Refused")[0]
    return [
        row.split("|")[2].strip()
        for row in table.splitlines()
        if row.startswith("| ") and "`" not in row[:4]
    ]


def _type(name: str) -> str:
    return families.class_of(name).config_class.model_type


def main() -> None:
    """Run as a script."""
    set_verbosity_error()
    torch.set_num_threads(1)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
