"""Packed weights are kept on disk: the next start reads them, and nothing wrong with them fails a start."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet_kernels.linear.group_weights import GroupWeights
from motet_kernels.linear.linear import Linear
from motet_kernels.linear.mixed_linear import MixedLinear
from motet_kernels.linear.pack import pack_groups, pack_linear
from motet_kernels.linear.scales import SpanScales
from motet_kernels.linear.stored import put_together, take_apart
from motet_kernels.runtime.errors import KernelError
from motet_llm.engine.engine import Engine
from motet_llm.models import fused_layers, support
from motet_llm.weights import coded_linear, packed_cache, packed_file, packer
from motet_llm.weights.packed_cache import PackedCache, key_of
from motet_llm.weights.packed_file import PackedModel
from support.checkpoints import quantized_checkpoints as made
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.checkpoints.quantized_checkpoints import answer, engine_of

CPU = torch.device("cpu")
N, K = 70, 100


def _codes(levels: str | None = None, group: int = 32, *, shift: bool = False) -> GroupWeights:
    codes_NK = torch.randint(16, (N, K), dtype=torch.uint8)
    scale_NG = torch.rand(N, -(-K // group)) + 0.1
    order_K = torch.randperm(K) if shift else None
    return GroupWeights(
        codes_NK, scale_NG, scale_NG * -7 if shift else None, group, order_K, levels
    )


def _spans() -> GroupWeights:
    fine_NG = torch.randint(-30, 30, (N, 7), dtype=torch.int8)
    codes_NK = torch.randint(-100, 100, (N, K), dtype=torch.int8)
    return GroupWeights(codes_NK, SpanScales(fine_NG, torch.rand(N, 2), 4), None, 16)


def _plain(form: str) -> Linear:
    return pack_linear(torch.randn(N, K), torch.randn(N), form)


def _pack(weights: GroupWeights, **options: bool) -> Any:
    return pack_groups(weights, torch.randn(N), CPU, **options)


PACKED: dict[str, Callable[[], Linear]] = {
    "float32": lambda: _plain("float32"),
    "bfloat16": lambda: _plain("bfloat16"),
    "int8": lambda: _plain("int8"),
    "int4": lambda: _plain("int4"),
    "float8": lambda: _plain("float8"),
    "codes of 4 bits": lambda: _pack(_codes()),
    "codes of 4 bits, shifts, an order": lambda: _pack(_codes(shift=True)),
    "codes of 4 bits, precise": lambda: _pack(_codes(), precise=True),
    "codes of 4 bits, one group": lambda: _pack(_codes(group=128)),
    "nf4": lambda: _pack(_codes("nf4", 64)),
    "codes of 8 bits, scales in two levels": lambda: _pack(_spans()),
    "several formats": lambda: MixedLinear([_pack(_codes()), _pack(_spans())]),
}


@pytest.mark.parametrize("kind", PACKED)
def test_matrices_are_taken_apart_and_put_together(kind: str) -> None:
    torch.manual_seed(0)
    original, x = PACKED[kind](), torch.randn(3, K)
    copy = put_together(*take_apart(original))
    assert torch.equal(copy(x), original(x))
    assert torch.equal(copy.weight(), original.weight())
    assert (copy.format, copy.nbytes) == (original.format, original.nbytes)


@pytest.mark.parametrize("kind", PACKED)
def test_tensors_that_do_not_fit_are_not_put_together(kind: str) -> None:
    """Native kernels read by address: what is smaller than its layout must not reach them."""
    fields, tensors = take_apart(PACKED[kind]())
    for name, tensor in tensors.items():
        for wrong in (tensor[:-1].clone(), tensor.to(torch.float64)):
            with pytest.raises(KernelError):
                put_together(fields, {**tensors, name: wrong})
        if "bias" not in name and "shift" not in name and name != "order":
            without = {other: value for other, value in tensors.items() if other != name}
            with pytest.raises(KernelError):
                put_together(fields, without)
    with pytest.raises(KernelError):
        put_together({**fields, "kind": "pickle"}, tensors)


# ------------------------------------------------------------------------------------------- engines
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a cache that keeps models of any size."""
    monkeypatch.setattr(packed_cache, "SMALLEST", 1)
    monkeypatch.setattr(packed_cache, "cache_root", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "packed"


def _start(checkpoint: Path, **settings: Any) -> Engine:
    """Return an engine whose packed weights, if they are new, have been written."""
    engine = engine_of(checkpoint, **settings)
    if (writing := engine.runner.packing.writing) is not None:
        writing.join(30)
        assert not writing.is_alive()
    return engine


def _kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.packed"))


def _fail(*_args: Any, **_options: Any) -> Any:
    raise AssertionError("this was done at an earlier start")


@pytest.mark.long(after=1)
@pytest.mark.parametrize("weights", ["auto", "int4"])
def test_the_second_start_packs_checks_and_examines_nothing(
    weights: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path / "model")
    first = _start(checkpoint, weights=weights)
    assert first.runner.capacity()["packed"] == "at this start"
    (path,) = _kept(folder)
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(packer, "pack_linear", _fail)
    monkeypatch.setattr(support, "examine", _fail)
    for comparison in ("_norm_like", "_mlp_like", "_layer_like"):
        monkeypatch.setattr(fused_layers, comparison, _fail)
    monkeypatch.setattr("motet_llm.weights.checkpoint.check_weights", _fail)
    second = _start(checkpoint, weights=weights)
    assert second.runner.capacity()["packed"] == f"in {folder}"
    assert second.runner.fused == first.runner.fused
    assert second.runner.fused["layers"] > 0
    assert answer(second) == answer(first)
    assert second.stats()["weight_bytes"] == first.stats()["weight_bytes"]


def test_codes_of_a_checkpoint_are_not_read_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, _ = made.gptq(tmp_path, symmetric=False, act=True, group=32)
    first = _start(checkpoint)
    monkeypatch.setattr(coded_linear, "of_steps", _fail)
    monkeypatch.setattr("motet_llm.weights.gptq.of_steps", _fail)
    assert answer(_start(checkpoint)) == answer(first)


@pytest.mark.long
def test_another_format_or_state_of_the_checkpoint_is_packed_for_itself(
    folder: Path, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path / "model")
    before = answer(_start(checkpoint))
    _start(checkpoint, weights="int8")
    assert len(_kept(folder)) == 2
    path, state = checkpoint / "model.safetensors", (checkpoint / "model.safetensors").stat()
    tensors = {name: -tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # as `cp -p` does
    assert path.stat().st_size == state.st_size
    assert answer(_start(checkpoint)) != before
    assert len(_kept(folder)) == 3


def test_a_hubs_files_are_known_by_the_names_of_their_blobs(tmp_path: Path) -> None:
    blobs, checkpoint = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    (blobs / ("a" * 64)).write_bytes(b"weights")
    (blobs / ("b" * 64)).write_bytes(b"weights")
    link = checkpoint / "model.safetensors"
    link.symlink_to(blobs / ("a" * 64))
    key = key_of(checkpoint, weights="int4")
    os.utime(blobs / ("a" * 64), ns=(1, 1))
    assert key_of(checkpoint, weights="int4") == key
    assert key_of(checkpoint, weights="int8") != key
    link.unlink()
    link.symlink_to(blobs / ("b" * 64))
    assert key_of(checkpoint, weights="int4") != key


def _cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _zero(path: Path) -> None:
    """Lose the blocks behind the header, as a file system may that was cut off from its power."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:start] + bytes(len(data) - start))


def _rename(path: Path) -> None:
    """Damage the header so that it can still be read."""
    data = path.read_bytes()
    assert data.count(b"gate_proj+up_proj") > 1
    path.write_bytes(data.replace(b"gate_proj+up_proj", b"gate_proj+xx_proj"))


def _show(path: Path) -> None:
    path.chmod(0o644)


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


@pytest.mark.long(after=1)
@pytest.mark.parametrize("damage", [_cut, _zero, _rename, _show, _link, Path.unlink])
def test_a_file_that_is_damaged_or_not_private_is_packed_again(
    damage: Callable[[Path], None], folder: Path, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path / "model")
    due = answer(_start(checkpoint))
    (path,) = _kept(folder)
    damage(path)
    again = _start(checkpoint)
    assert again.runner.capacity()["packed"] == "at this start"
    assert answer(again) == due
    assert _start(checkpoint).runner.capacity()["packed"] == f"in {folder}"


def test_a_file_of_another_key_is_not_taken(folder: Path, tmp_path: Path) -> None:
    _start(tiny_checkpoint("llama", tmp_path / "model"))
    (path,) = _kept(folder)
    path.rename(path.with_name("0" * 64 + ".packed"))
    assert PackedCache(1 << 30).begin("0" * 64) is None


def _no_space(*_args: Any, **_options: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.long(after=1)
@pytest.mark.parametrize("fault", ["full", "nearly full", "no folder", "not private"])
def test_a_folder_that_cannot_be_written_fails_no_start(
    fault: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path / "model")
    if fault == "full":
        monkeypatch.setattr(packed_file, "_write_tensors", _no_space)
    elif fault == "nearly full":
        monkeypatch.setattr(packed_cache, "_FREE_SHARE", 1.0)
    elif fault == "no folder":
        folder.parent.write_text("a file")
    else:
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    answer(_start(checkpoint))
    left = sorted(folder.iterdir()) if folder.is_dir() else []
    assert [path.name for path in left if path.name != ".lock"] == []


def test_the_least_recently_used_models_leave(folder: Path) -> None:
    torch.manual_seed(0)
    model = PackedModel({"layer": _plain("float32")}, examined=True)
    size, keys = model.nbytes, [digit * 64 for digit in "123"]
    cache = PackedCache(3 * size)
    folder.mkdir(parents=True, mode=0o700)
    older = folder / f"{'0' * 64}.safetensors"  # of an earlier version
    older.write_bytes(bytes(2 * size))
    os.utime(older, (0, 0))
    assert cache.keep_later(keys[0], PackedModel({}, examined=True)) is None
    for number, key in enumerate(keys[:2]):
        assert cache.keep(key, model)
        os.utime(folder / f"{key}.packed", (number, number))
    reading = cache.begin(keys[0])
    assert reading is not None
    found = reading.layout()
    reading.wait()
    assert torch.equal(found.matrices["layer"].weight(), model.matrices["layer"].weight())
    assert cache.keep(keys[2], model)
    assert [path.stem for path in _kept(folder)] == [keys[0], keys[2]]
    assert PackedCache(size - 1).keep_later(keys[1], model) is None


def test_the_setting_turns_it_off(folder: Path, tmp_path: Path) -> None:
    engine = engine_of(tiny_checkpoint("llama", tmp_path / "model"), packed_cache=0)
    assert engine.runner.packing.writing is None
    assert not folder.exists()
