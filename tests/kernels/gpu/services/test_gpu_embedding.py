"""The embedding service's engine on a GPU, or in the interpreter: vectors as on the CPU, attention in one launch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from motet_embedding.config import EngineConfig
from motet_embedding.encoder import Encoder
from motet_embedding.engine import Engine
from motet_embedding.texts import Text
from support.checkpoints.embedding_checkpoints import PADDED, ids, plain, sentence_transformer
from support.running.triton_modes import calls_of, without_triton

TEXTS = [Text(ids(length, seed)) for seed, length in enumerate((2, 13, 9, 3))]
LAYERS, LONGEST = 2, 24


def load(path: Path, device: str, **settings: object) -> Encoder:
    return Encoder.load(
        EngineConfig(model=str(path), device=device, max_length=LONGEST, **settings)  # type: ignore[arg-type]
    )


def vectors(encoder: Encoder) -> torch.Tensor:
    """Of all texts, asked for by two callers."""
    engine = Engine(EngineConfig(model=str(encoder.folder.root)), encoder)
    engine.add("first", TEXTS[:3])
    engine.add("second", TEXTS[3:])
    found: dict[tuple[object, int], torch.Tensor] = {}
    while engine.has_work:
        for output in engine.step():
            rows = torch.from_numpy(np.concatenate(output.vectors))
            found |= {
                (output.key, place): row for place, row in zip(output.places, rows, strict=True)
            }
    return torch.stack([found["first", place] for place in range(3)] + [found["second", 0]])


def on_cpu(path: Path, **settings: object) -> torch.Tensor:
    with without_triton():
        return vectors(load(path, "cpu", **settings))


# BERT; windows to both sides; causal, and heads that share keys; attention that is the model's own.
@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3", "t5"])
@pytest.mark.timeout(600)
def test_vectors_are_those_of_the_cpu(
    device: torch.device, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plain(tmp_path, family)
    due = on_cpu(path)
    encoder = load(path, str(device))
    from motet_kernels.gpu.attention import full_attention

    launches = calls_of(monkeypatch, full_attention, "packed_attention")
    found = vectors(encoder)
    torch.testing.assert_close(found, due, atol=1e-5, rtol=0)
    said = encoder.describe()
    assert (said["dtype"], said["kernels"], torch.device(said["device"]).type) == (
        "float32",
        "triton",
        device.type,
    )
    assert encoder.packed == (family not in PADDED)
    assert len(launches) == (LAYERS if encoder.packed else 0), (
        "one step, one launch per layer, whatever texts there are"
    )


def test_dense_layers_and_poolings_lie_where_the_model_does(
    device: torch.device, tmp_path: Path
) -> None:
    said = {"pooling_mode_weightedmean_tokens": True}
    path = sentence_transformer(tmp_path, pooling=said, dense=12, normalize=True)
    torch.testing.assert_close(vectors(load(path, str(device))), on_cpu(path), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_are_of_the_checkpoints_type(
    device: torch.device, tmp_path: Path, dtype: torch.dtype
) -> None:
    path = plain(tmp_path)
    AutoModel.from_pretrained(path, dtype=dtype).save_pretrained(path)
    encoder = load(path, str(device))
    assert encoder.describe()["dtype"] == str(dtype).removeprefix("torch.")
    assert (vectors(encoder) * on_cpu(path)).sum(dim=1).min() > 0.99
