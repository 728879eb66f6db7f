"""Write tiny quantized checkpoints as the formats' papers define, with their float32 values.

No packing code is shared with the loader.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import tiny_checkpoint

# Log-probabilities are within these of transformers' in float32, on the tiny checkpoints here: with
# inputs of 8 bits beside codes of 4, and with inputs of 16.
ROUNDED, ROUNDED_BYTES, PRECISE = 0.06, 0.15, 1e-3  # ROUNDED_BYTES: beside codes of 8 bits
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
Codes = tuple[np.ndarray, np.ndarray, np.ndarray]  # steps [N, K], scales [N, G], zeros [N, G]


def quantize(weight: Tensor, bits: int, groups: np.ndarray, symmetric: bool) -> Codes:
    """Return steps of 0 to 2^bits - 1 and float16 scales; input k is in group `groups[k]`."""
    rows, top = weight.numpy().astype(np.float64), (1 << bits) - 1
    count = int(groups.max()) + 1
    steps = np.zeros(rows.shape, np.int64)
    scales, zeros = np.zeros((len(rows), count)), np.zeros((len(rows), count), np.int64)
    for g in range(count):
        part = rows[:, groups == g]
        if symmetric:
            scale = 2 * np.abs(part).max(1) / top
            zero = np.full(len(rows), 1 << (bits - 1))
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / top
            zero = np.clip(np.round(-low / scale), 1, top).astype(np.int64)
        scale = scale.astype(np.float16).astype(np.float64)
        scales[:, g], zeros[:, g] = scale, zero
        steps[:, groups == g] = np.clip(np.round(part / scale[:, None]) + zero[:, None], 0, top)
    return steps, scales, zeros


def stands_for(codes: Codes, groups: np.ndarray) -> Tensor:
    steps, scales, zeros = codes
    return torch.from_numpy((steps - zeros[:, groups]) * scales[:, groups]).float()


def words(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack int32 words `[R, C · bits / 32]`, lowest bits first; `order` permutes the values of a
    word.
    """
    count = 32 // bits
    order = order or tuple(range(count))
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % count))).astype(np.uint32)
    out = np.zeros((len(values), padded.shape[1] // count), np.uint32)
    for i in range(count):
        out |= padded[:, order[i] :: count] << np.uint32(bits * i)
    return torch.from_numpy(out.view(np.int32).copy())


def _matrices(tensors: dict[str, Tensor]) -> list[str]:
    return [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]


def calmed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as large as those of trained models: attention does not fall on single tokens."""
    return {name: tensor * 0.4 if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}


def make(
    folder: Path,
    settings: dict[str, Any],
    pack: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]],
    family: str = "llama",
) -> tuple[Path, Path]:
    """Write a quantized checkpoint, and one with its float32 values.

    `pack(module, weight)` returns its tensors by the ends of their names, and the dequantized
    weight.
    """
    plain = tiny_checkpoint(family, folder / "plain", **SIZES)
    tensors = calmed(load_file(plain / "model.safetensors"))
    coded, dense = dict(tensors), dict(tensors)
    for module in _matrices(tensors):
        parts, dense[f"{module}.weight"] = pack(module, coded.pop(f"{module}.weight"))
        coded |= {f"{module}.{end}": part.contiguous() for end, part in parts.items()}
    save_file(dense, plain / "model.safetensors", {"format": "pt"})
    quantized = tiny_checkpoint(family, folder / "quantized", **SIZES)
    save_file(coded, quantized / "model.safetensors", {"format": "pt"})
    set_config(quantized, quantization_config=settings)
    return quantized, plain


def set_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def gptq(
    folder: Path,
    *,
    bits: int = 4,
    group: int = 64,
    symmetric: bool = True,
    version: str = "gptq",
    act: bool = False,
) -> tuple[Path, Path]:
    """Write AutoGPTQ's format ("gptq": zeros less one) or GPTQModel's ("gptq_v2").

    act: groups in any order of inputs.
    """

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        groups = np.arange(inputs) // size
        if act:
            groups = np.random.default_rng(inputs).permutation(groups)
        codes = quantize(weight, bits, groups, symmetric)
        steps, scales, zeros = codes
        tensors = {
            "qweight": words(steps, bits).T,
            "qzeros": words(zeros.T - (version == "gptq"), bits),
            "scales": torch.from_numpy(scales.T.astype(np.float16)),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return tensors, stands_for(codes, groups)

    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": act,
        "sym": symmetric,
    }
    return make(folder, settings | {"checkpoint_format": version}, pack)


def awq(folder: Path, *, group: int = 64, version: str = "gemm") -> tuple[Path, Path]:
    """Write AutoAWQ's gemm layout, or gemv, which packs along the inputs and pads groups."""

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = np.arange(weight.shape[1]) // group
        codes = quantize(weight, 4, groups, False)
        return (_gemm if version == "gemm" else _gemv)(codes), stands_for(codes, groups)

    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": version,
    }
    return make(folder, settings, pack, "qwen3")


def _gemm(codes: Codes) -> dict[str, Tensor]:
    steps, scales, zeros = codes
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(steps.T, 4, order), "qzeros": words(zeros.T, 4, order)}
    return tensors | {"scales": torch.from_numpy(scales.T.astype(np.float16))}


def _gemv(codes: Codes) -> dict[str, Tensor]:
    steps, scales, zeros = codes
    padded = np.zeros((len(steps), 16), np.float16)
    padded[:, : scales.shape[1]] = scales
    wide = np.zeros((len(steps), 16), np.int64)
    wide[:, : zeros.shape[1]] = zeros
    tensors = {"qweight": words(steps, 4), "qzeros": words(wide, 4)}
    return tensors | {"scales": torch.from_numpy(padded)}


def compressed(
    folder: Path,
    form: str,
    *,
    kind: str = "int",
    bits: int = 4,
    group: int = 0,
    symmetric: bool = True,
    block: int = 0,
) -> tuple[Path, Path]:
    """Write compressed-tensors' `form`; without `group`, a scale per output or per `block`."""

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return (
            _floats(weight, block)
            if kind == "float"
            else _integers(weight, bits, group, symmetric, form)
        )

    strategy = "group" if group else "block" if block else "channel"
    weights = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy}
    weights |= {"group_size": group or None, "block_structure": [block, block] if block else None}
    scheme = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": scheme,
        "ignore": ["lm_head"],
    }
    return make(folder, settings, pack)


def _floats(weight: Tensor, block: int) -> tuple[dict[str, Tensor], Tensor]:
    features, inputs = weight.shape
    high, wide = (block, block) if block else (1, inputs)
    squares = weight.view(features // high, high, inputs // wide, wide)
    scale = squares.abs().amax((1, 3)) / 448
    wide_scale = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)
    codes = (weight / wide_scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * wide_scale


def _integers(
    weight: Tensor, bits: int, group: int, symmetric: bool, form: str
) -> tuple[dict[str, Tensor], Tensor]:
    groups = np.arange(weight.shape[1]) // (group or weight.shape[1])
    codes = quantize(weight, bits, groups, symmetric)
    steps, scales, zeros = codes
    half = 1 << (bits - 1)
    tensors = {"weight_scale": torch.from_numpy(scales.astype(np.float16))}
    if form == "pack-quantized":
        tensors |= {"weight_packed": words(steps, bits), "weight_shape": torch.tensor(weight.shape)}
    else:
        tensors["weight"] = torch.from_numpy((steps - half).astype(np.int8))
    if not symmetric:
        packed = (
            words(zeros.T, bits).T
            if form == "pack-quantized"
            else torch.from_numpy((zeros - half).astype(np.int8))
        )
        tensors["weight_zero_point"] = packed
    return tensors, stands_for(codes, groups)


PROMPT = [(7 * i) % 250 for i in range(20)]
TOKENS = 6


def engine_of(folder: Path, **settings: Any) -> Engine:
    return Engine(
        EngineConfig(
            model=str(folder), threads=1, num_blocks=16, max_running=4, token_budget=32, **settings
        )
    )


def answer(engine: Engine) -> tuple[list[int], list[float]]:
    """Return greedy tokens and their log-probabilities."""
    engine.add("a", PROMPT, Sampling(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=0))
    ids: list[int] = []
    logprobs: list[float] = []
    while engine.has_work:
        for output in engine.step():
            ids += output.ids
            logprobs += [entry.logprob for entry in output.logprobs or []]
    return ids, logprobs


def check(
    quantized: Path, dense: Path, form: str, layers: int = 2, precise: float = PRECISE
) -> None:
    """Require the tokens and log-probabilities of transformers in float32.

    With inputs of 8 bits, and with a wider bound `precise` for those of 16 (14 beside tables of
    wide levels), another token may be chosen where two are equal within the bound.
    """
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    rounded = ROUNDED_BYTES if form.startswith("int8") else ROUNDED
    for inputs, bound, near in (
        ("int8", rounded, rounded),
        ("int16", precise, precise if precise > PRECISE else 0.0),
    ):
        engine = engine_of(quantized, code_inputs=inputs)
        ids, logprobs = answer(engine)
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
        due = logits.log_softmax(-1)
        chosen = due.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
        assert float((due.amax(-1) - chosen).max()) <= near
        torch.testing.assert_close(torch.tensor(logprobs), chosen, rtol=0, atol=bound)
        assert form in engine.runner.describe()["weights"]
        assert engine.runner.fused["layers"] == layers
        whole = sum(parameter.nbytes for parameter in model.parameters())
        assert engine.runner.weight_bytes < whole / 2
