"""What goes into the eyes and what comes out, compared with transformers' own processors and models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from motet_encoder.checkpoint import load_family
from motet_encoder.engine import Engine
from motet_encoder.families import EncoderFamily
from motet_shared.errors import ConfigError, InternalError
from support.checkpoints.vlm_checkpoints import FAMILIES, picture, reference, tiny_vlm
from support.running.refusals import refuses

TOLERANCE = 1e-4
SIZES = [(60, 50), (31, 140), (200, 64), (9, 7)]
PROCESSORS: dict[str, Any] = {
    "llava_clip": LlavaProcessor,
    "llava_siglip": LlavaProcessor,
    "qwen2_5_vl": Qwen2_5_VLProcessor,
    "qwen3_vl": Qwen3VLProcessor,
    "smolvlm": SmolVLMProcessor,
    "idefics3": Idefics3Processor,
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, EncoderFamily]:
    folder = tiny_vlm(request.param, tmp_path_factory.mktemp(request.param))
    return request.param, folder, load_family(folder, torch.float32)


def theirs(
    name: str, folder: Path, wide_high: tuple[int, int], **settings: Any
) -> tuple[Any, list[int]]:
    """The inputs that transformers makes of a picture, and the tokens that stand for it."""
    processor, tokenizer = (
        AutoImageProcessor.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    rows: dict[str, Any] = {"return_row_col_info": True} if name in ("smolvlm", "idefics3") else {}
    inputs = processor([picture(1, *wide_high)], return_tensors="pt", **rows, **settings)
    mark = FAMILIES[name].marks[0]
    whole = SimpleNamespace(
        image_processor=processor,
        image_token=mark,
        patch_size=14,
        num_additional_image_tokens=int(name == "llava_clip"),
        vision_feature_select_strategy="default" if name == "llava_clip" else "full",
        image_seq_len=4,
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        global_image_tag="<global-img>",
    )
    text = PROCESSORS[name].replace_image_token(whole, inputs, 0)
    for extra in ("rows", "cols"):
        inputs.pop(extra, None)
    return inputs, tokenizer.encode(text, add_special_tokens=False)


@torch.inference_mode()
def test_pictures_of_any_size_are_encoded_as_by_transformers(
    made: tuple[str, Path, EncoderFamily],
) -> None:
    name, folder, family = made
    model = reference(folder)
    prepared = [family.prepare(picture(1, *size), 0) for size in SIZES]
    engine = Engine(family, max_patches=10_000)
    for key, one in enumerate(prepared):
        engine.add(key, one)
    found: dict[Any, Any] = {}
    while engine.has_work:
        found |= {output.key: output for output in engine.step()}
    for key, size in enumerate(SIZES):
        inputs, ids = theirs(name, folder, size)
        seen = model.model.get_image_features(**inputs)
        expected = torch.stack(
            [layer[0] for layer in (seen.pooler_output, *getattr(seen, "deepstack_features", []))]
        )
        assert isinstance(found[key].result, torch.Tensor)
        assert prepared[key].ids == ids
        assert torch.allclose(found[key].result, expected, atol=TOLERANCE, rtol=TOLERANCE)


@torch.inference_mode()
def test_bfloat16_is_as_near_to_the_exact_embeddings_as_transformers_is(
    made: tuple[str, Path, EncoderFamily],
) -> None:
    """Norms, gates, products and attention round to it once each, as transformers does or less often."""
    name, folder, family = made
    narrow = load_family(folder, torch.bfloat16)
    exact, found = (one.encode([one.prepare(picture(1), 0)])[0] for one in (family, narrow))
    inputs, _ = theirs(name, folder, picture(1).size)
    inputs = {n: p.bfloat16() if p.is_floating_point() else p for n, p in inputs.items()}
    seen = reference(folder).bfloat16().model.get_image_features(**inputs)
    beside = torch.stack(
        [layer[0] for layer in (seen.pooler_output, *getattr(seen, "deepstack_features", []))]
    ).float()
    assert float((found - exact).norm()) < 2 * float((beside - exact).norm()) + 1e-3


@pytest.mark.parametrize("name", ["llava_clip", "llava_siglip"])
def test_what_no_feature_reads_is_not_kept(name: str, tmp_path: Path) -> None:
    """LLaVA reads the last layer but one or the last, and no vector of the whole picture."""
    folder = tiny_vlm(name, tmp_path)
    tower, whole = load_family(folder, torch.float32).model.vision_tower, reference(folder)
    layers = [
        [m for m in one.modules() if type(m).__name__.endswith("EncoderLayer")]
        for one in (tower, whole.model.vision_tower)
    ]
    last = name == "llava_siglip"  # which reads the last layer
    kept = [len(list(layer.children())) > 0 for layer in layers[0]]
    assert kept == [*[True] * (len(layers[1]) - 1), last]
    assert not hasattr(tower, "head")


def test_alike_pictures_are_encoded_together(made: tuple[str, Path, EncoderFamily]) -> None:
    _, _, family = made
    engine = Engine(family, max_patches=10_000)
    for key in range(3):
        engine.add(key, family.prepare(picture(key), 0))
    assert all(isinstance(output.result, torch.Tensor) for output in engine.step())
    assert engine.stats()["batch_size"] == 3
    assert not engine.has_work


def test_the_budget_of_patches_parts_batches(made: tuple[str, Path, EncoderFamily]) -> None:
    _, _, family = made
    prepared = [family.prepare(picture(key), 0) for key in range(3)]
    engine = Engine(family, max_patches=prepared[0].patches * 2)
    for key, one in enumerate(prepared):
        engine.add(key, one)
    assert [output.key for output in engine.step()] == [0, 1]
    engine.cancel(2)
    assert not engine.has_work


def test_one_that_fails_spoils_no_other(made: tuple[str, Path, EncoderFamily]) -> None:
    _, _, family = made
    good, bad = (family.prepare(picture(key), 0) for key in (1, 2))
    name = "pixel_values"
    bad.inputs[name] = bad.inputs[name][..., :1]
    nan = family.prepare(picture(3), 0)
    nan.inputs[name][:] = torch.nan
    engine = Engine(family, max_patches=10_000)
    for key, one in (("good", good), ("bad", bad), ("nan", nan)):
        engine.add(key, one)
    outputs = {output.key: output for output in engine.step()}
    assert isinstance(outputs["good"].result, torch.Tensor)
    refused = outputs["bad"].result
    assert isinstance(refused, InternalError)
    assert refused.__cause__ is not None, "its traceback is logged"
    assert isinstance(outputs["nan"].result, InternalError)


def test_fewer_pixels_are_fewer_tokens(made: tuple[str, Path, EncoderFamily]) -> None:
    name, folder, family = made
    large = family.prepare(picture(1, 130, 100), 0)
    small = family.prepare(picture(1, 130, 100), 33 * 33)
    if name.startswith("llava"):
        assert small.ids == large.ids
        return
    assert len(small.ids) < len(large.ids)
    settings: dict[str, Any] = {"do_image_splitting": False}
    if name.startswith("qwen"):
        settings = {"size": {"shortest_edge": 28 * 28, "longest_edge": 33 * 33}}
    assert small.ids == theirs(name, folder, (130, 100), **settings)[1]


def test_a_text_only_checkpoint_does_not_see(tmp_path: Path) -> None:
    from support.checkpoints.language_checkpoints import tiny_checkpoint

    with refuses(ConfigError, "model"):
        load_family(tiny_checkpoint("llama", tmp_path), torch.float32)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_vlm("llava_clip", tmp_path)
    weights = load_file(folder / "model.safetensors")
    gone = next(name for name in weights if "multi_modal_projector" in name)
    del weights[gone]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"multi_modal_projector"):
        load_family(folder, torch.float32)
