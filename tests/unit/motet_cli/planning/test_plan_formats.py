"""Test that `motet plan` counts what the engine holds, for checkpoints in every format."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from motet_cli.main import main
from motet_models.gguf_tensors import codes_of_tensors, parse_tensors, read_tensors
from motet_models.quantization import METHODS, codes_of
from motet_models.weight_formats import WEIGHT_FORMATS
from motet_shared.errors import ConfigError
from support.checkpoints import experts_checkpoints as experts
from support.checkpoints import gguf_files
from support.checkpoints import more_quantized_checkpoints as more
from support.checkpoints import quantized_checkpoints as made
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.peers.model_hub import Repository, model_hub

OPTIONS = ["--memory", "64GB", "--context", "128", "--json"]
WITHIN = 0.03  # share by which a plan may differ from the engine
MADE: dict[str, Callable[[Path], Any]] = {
    "gptq": lambda at: made.gptq(at),
    "gptq, zero points": lambda at: made.gptq(at, symmetric=False, version="gptq_v2"),
    "gptq, eight bits, one group": lambda at: made.gptq(at, bits=8, group=-1),
    "awq": lambda at: made.awq(at),
    "packed int4": lambda at: made.compressed(at, "pack-quantized", group=32),
    "packed int4, zero points": lambda at: made.compressed(
        at, "pack-quantized", group=128, symmetric=False
    ),
    "int8": lambda at: made.compressed(at, "int-quantized", bits=8),
    "float8": lambda at: made.compressed(at, "float-quantized", kind="float", bits=8),
    "float8, blocks": lambda at: made.compressed(
        at, "naive-quantized", kind="float", bits=8, block=64
    ),
    "fp8, blocks of 128": more.float8_blocks,
    "fp8, a scale per matrix": lambda at: more.float8_blocks(at, 0),
    "nf4": lambda at: more.bnb_four_bits(at, "nf4", nested=False),
    "nf4, nested scales": lambda at: more.bnb_four_bits(at, "nf4", nested=True),
    "LLM.int8": more.bnb_eight_bits,
    "experts in float8": experts.float8_experts,
    "experts in mxfp4": experts.mxfp4_experts,
}


def planned(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> int:
    """Return the weight bytes that the command prints."""
    assert main(["plan", str(folder), *OPTIONS, *options]) == 0
    return int(json.loads(capsys.readouterr().out)["plan"]["weights"])


def held(folder: Path, **settings: Any) -> int:
    """Return the weight bytes that an engine holds after loading."""
    engine = made.engine_of(folder, **settings)
    found = engine.runner.weight_bytes
    engine.close()
    return found


@pytest.mark.long(after=3)
@pytest.mark.parametrize("kind", MADE)
def test_quantized_checkpoints(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = MADE[kind](tmp_path)[0]
    assert planned(folder, capsys) == pytest.approx(held(folder), rel=WITHIN)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4", "float32"])
def test_experts(weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts of 16 bits stay so on CPUs, and are quantized as other matrices are."""
    import torch

    folder = experts.plain(tmp_path / "m", experts.QWEN3_MOE, torch.bfloat16)
    found = planned(folder, capsys, "--weights", weights)
    assert found == pytest.approx(held(folder, weights=weights), rel=WITHIN)


@pytest.mark.parametrize("weights", ["int4", "int8", "float8"])
def test_experts_of_a_gpu(weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They take the bytes of the format that is asked for, as the engine packs them there."""
    import torch

    from motet_kernels.linear.expert_linear import ExpertLinear

    config = experts.QWEN3_MOE
    folder = experts.plain(tmp_path / "m", config)
    on_gpu = planned(folder, capsys, "--gpu", "H100", "--weights", weights)
    count, inner = config.num_experts, config.moe_intermediate_size
    stack = torch.randn(count, 2 * inner, config.hidden_size)
    packed = ExpertLinear.quantized(stack, None, weights, torch.device("cpu"))
    form = WEIGHT_FORMATS[weights]
    due = form.matrix_bytes(stack.numel(), count * 2 * inner)
    assert packed.nbytes == pytest.approx(due, rel=0.05)
    assert on_gpu < planned(folder, capsys, "--gpu", "H100") - 1.4 * stack.numel()


def test_the_own_format_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_checkpoint("qwen3", tmp_path / "m", **made.SIZES)
    assert planned(folder, capsys) == pytest.approx(held(folder), rel=WITHIN)


def test_a_method_that_is_not_read_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        codes_of({"quantization_config": {"quant_method": "exl2"}})
    assert caught.value.param == "quant_method"
    assert codes_of({}) is None


LAYERS = range(4)


@pytest.mark.parametrize(
    ("names", "plain"),
    [
        (["lm_head"], set()),
        # Norms and routers are never in codes, wherever they are listed.
        ([f"model.layers.{n}.post_attention_layernorm" for n in LAYERS], set()),
        ([f"model.layers.{n}.mlp.gate" for n in LAYERS], set()),
        (["model.layers.0.self_attn.q_proj"], set()),
        ([f"model.layers.{n}.self_attn.o_proj" for n in LAYERS], {"attention"}),
        (["re:.*self_attn.*"], {"attention"}),
        (["re:.*mlp.experts.*"], {"experts"}),
    ],
)
def test_parts_that_are_left_out_are_not_in_codes(names: list[str], plain: set[str]) -> None:
    settings = {"quant_method": "fp8", "modules_to_not_convert": names}
    found = codes_of({"num_hidden_layers": len(LAYERS), "quantization_config": settings})
    assert found is not None
    assert {"attention", "mlp", "experts", "recurrent"} - set(found.parts) == plain


def test_the_methods_are_those_of_the_engine() -> None:
    from motet_llm.weights import quantized_checkpoint

    assert METHODS.keys() == quantized_checkpoint.METHODS.keys()


# ------------------------------------------------------------------------------------------------------------- GGUF
KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", [*KINDS, "IQ4_XS", "MXFP4", "tied"])
def test_gguf_files(kind: str, tmp_path: Path) -> None:
    from motet_kernels.linear.gguf_blocks import KINDS as READ
    from unit.motet_llm.weights.test_llm_gguf import MIXED, make

    assert {*KINDS, "IQ4_XS", "MXFP4"} == set(READ)
    if kind == "tied":
        folder, _ = make(tmp_path, "qwen3", MIXED, tie_word_embeddings=True)
    else:
        folder, _ = make(tmp_path, "llama", {"_proj": kind})
    path = next(folder.glob("*.gguf"))
    codes = codes_of_tensors(read_tensors(path), WEIGHT_FORMATS["float32"], on_gpu=False)
    assert codes.total == pytest.approx(held(folder), rel=WITHIN)


PROGRAM = """
import sys
from motet_cli.hub import gguf_header
from motet_cli.main import main

gguf_header._FIRST = 1 << 14  # so that the header comes in parts
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
def test_a_gguf_file_on_a_hub_is_planned_from_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path / "cache"))
    source = tiny_checkpoint("qwen3", tmp_path / "source", **made.SIZES)
    path = gguf_files.write_qwen3(source, tmp_path / "model.gguf")
    data = path.read_bytes()
    local = planned(path, capsys)
    with model_hub(org__name=Repository({"model.gguf": data})) as hub:
        # huggingface_hub reads its settings once.
        env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}
        command = [sys.executable, "-c", PROGRAM, "plan", "org/name:model.gguf", *OPTIONS]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["weights"] == local
    (kept,) = (tmp_path / "cache" / "headers").rglob("*.gguf")
    assert kept.stat().st_size == len(data)
    beginning = kept.read_bytes().rstrip(b"\0")
    assert data.startswith(beginning)
    assert len(beginning) < len(data) / 2  # tensors were not read
    assert list((tmp_path / "hub").rglob("*.gguf")) == []
    assert read_tensors(kept) == parse_tensors(data)
