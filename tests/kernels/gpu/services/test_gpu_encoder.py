"""The encoder service's engine on a GPU, or in the interpreter: embeddings as on the CPU, attention in one launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from motet_encoder.checkpoint import load_family
from motet_encoder.engine import Engine
from motet_encoder.families import EncoderFamily, Prepared
from motet_encoder.tower_attention import attend
from motet_encoder.video import Video
from support.checkpoints.vlm_checkpoints import FAMILIES, picture, tiny_vlm
from support.running.triton_modes import calls_of, without_triton

SIZES = [(60, 50), (31, 84)]
LAYERS = {
    "llava_clip": 2,  # of three, whose last one no feature reads
    "llava_siglip": 3,
    "qwen2_5_vl": 2,
    "qwen3_vl": 3,
    "smolvlm": 3,
    "idefics3": 3,
}
SETTINGS: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}


def load(
    folder: Path, device: torch.device, weights: str = "exact", dtype: torch.dtype | None = None
) -> EncoderFamily:
    return load_family(folder, dtype, weights, device)


def prepared(family: EncoderFamily) -> list[Prepared]:
    """Pictures in one step."""
    return [family.prepare(picture(1, *size), 0) for size in SIZES]


def embeddings(family: EncoderFamily, pictures: list[Prepared]) -> list[torch.Tensor]:
    engine = Engine(family, max_patches=10_000)
    for key, one in enumerate(pictures):
        engine.add(key, one)
    found = []
    for output in engine.step():
        assert isinstance(output.result, torch.Tensor), output.result
        assert (output.result.device.type, output.result.dtype) == ("cpu", torch.float32)
        found.append(output.result)
    assert not engine.has_work
    return found


def on_cpu(
    folder: Path, weights: str = "exact", dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    with without_triton():
        family = load(folder, torch.device("cpu"), weights, dtype)
        return embeddings(family, prepared(family))


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.timeout(600)
def test_embeddings_are_those_of_the_cpu(
    device: torch.device, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_vlm(name, tmp_path)
    due = on_cpu(folder)
    family = load(folder, device)
    from motet_kernels.gpu.attention import full_attention

    pictures = prepared(family)
    launches = calls_of(monkeypatch, full_attention, "packed_attention")
    for found, wanted in zip(embeddings(family, pictures), due, strict=True):
        torch.testing.assert_close(found, wanted, **SETTINGS)
    said = family.describe()
    assert (said["dtype"], said["kernels"], torch.device(said["device"]).type) == (
        "float32",
        "triton",
        device.type,
    )
    assert len(launches) == LAYERS[name], (
        "one launch per layer, whatever pictures and windows there are"
    )


@pytest.mark.timeout(600)
def test_a_video_is_seen_as_on_the_cpu(device: torch.device, tmp_path: Path) -> None:
    folder = tiny_vlm("qwen2_5_vl", tmp_path)
    video = Video([picture(seed) for seed in range(4)], 2.0)
    with without_triton():
        family = load(folder, torch.device("cpu"))
        [due] = embeddings(family, [family.prepare_video(video, 0)])
    family = load(folder, device)
    [found] = embeddings(family, [family.prepare_video(video, 0)])
    torch.testing.assert_close(found, due, **SETTINGS)


@pytest.mark.timeout(600)
def test_int8_matrices_are_rounded_as_on_the_cpu(device: torch.device, tmp_path: Path) -> None:
    folder = tiny_vlm("llava_siglip", tmp_path)
    family = load(folder, device, "int8")
    for found, due in zip(
        embeddings(family, prepared(family)), on_cpu(folder, "int8"), strict=True
    ):
        assert (found - due).norm() < 0.02 * due.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llava_clip", "qwen2_5_vl"])
@pytest.mark.timeout(600)
def test_activations_are_of_the_checkpoints_type(
    device: torch.device, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    folder = tiny_vlm(name, tmp_path)
    kind = getattr(transformers, FAMILIES[name].model)
    kind.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    family = load(folder, device)
    assert family.describe()["dtype"] == str(dtype).removeprefix("torch.")
    for found, due in zip(embeddings(family, prepared(family)), on_cpu(folder), strict=True):
        assert (found - due).norm() < 0.05 * due.norm()


def test_what_lies_beside_a_picture_is_not_attended_to(device: torch.device) -> None:
    """The mask of pictures that do not fill their frame."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 3, 5, 8, generator=generator).to(device) for _ in range(3))
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool, device=device)
    mask[1, :, :, 3:] = False
    out, _ = attend(torch.nn.Identity(), query, key, value, mask, scaling=0.3)
    alone, _ = attend(torch.nn.Identity(), query[:1], key[:1], value[:1], None, scaling=0.3)
    short, _ = attend(
        torch.nn.Identity(), query[1:, :, :3], key[1:, :, :3], value[1:, :, :3], None, scaling=0.3
    )
    torch.testing.assert_close(out[:1], alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[1:, :3], short, atol=1e-5, rtol=1e-5)
