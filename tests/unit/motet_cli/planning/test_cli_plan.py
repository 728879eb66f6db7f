"""Test `motet plan`: its output and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from motet_cli.main import main
from motet_cli.planning.engine_memory import parse_bytes
from motet_cli.planning.this_cpu import read_bandwidth, this_cpu
from motet_models.capacity import format_bytes
from support.peers.public_models import KNOWN


def config_folder(tmp_path: Path, name: str) -> str:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN[name][3]))
    return str(tmp_path)


def test_the_command_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = config_folder(tmp_path, "Llama-3.1-8B")
    assert main(["plan", folder, "--gpu", "h100", "--context", "8k"]) == 0
    out = capsys.readouterr().out
    for words in (
        "8,030,261,248",
        "14.96 GiB",
        "128.00 KiB",
        "8,192 tokens",
        "decode, 1 sequence",
        "H100",
    ):
        assert words in out


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = config_folder(tmp_path, "GPT-OSS-20B")
    cpu = ["--cpu", "--bandwidth", "50GB", "--gflops", "1000", "--threads", "1"]
    assert (
        main(
            [
                "plan",
                f"{folder}/config.json",
                "--memory",
                "128GiB",
                "--weights",
                "int4",
                *cpu,
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"]["total"] == 20_914_757_184
    assert found["plan"]["used"] <= 128 << 30
    assert found["processor"]["bandwidth"] == 50e9
    assert set(found["roofline"]) == {
        "decode, 1 sequence",
        f"decode, {found['plan']['running']} sequences",
        "prefill",
    }


@pytest.mark.parametrize("name", ["int8", "float8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("model", "per_token"),
    [
        ("Llama-3.1-8B", 32 * 2 * 8 * (128 + 4)),
        ("DeepSeek-V3", 61 * (512 + 64 + 4)),
    ],  # a latent has one scale
)
def test_eight_bit_caches_store_scales(
    model: str, per_token: int, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [
        "plan",
        config_folder(tmp_path, model),
        "--memory",
        "2TB",
        "--gpu",
        "H100",
        "--weights",
        "float8",
        "--json",
    ]
    found = {}
    for kv_dtype in ("bf16", name):
        assert main([*where, "--kv-dtype", kv_dtype]) == 0
        found[kv_dtype] = json.loads(capsys.readouterr().out)
    assert found[name]["plan"]["per_token"] == per_token
    assert found[name]["plan"]["num_blocks"] > found["bf16"]["plan"]["num_blocks"]
    assert found[name]["plan"]["weights"] == found["bf16"]["plan"]["weights"]
    alone = [
        found[kv]["roofline"]["decode, 1 sequence"]["tokens_per_second"] for kv in (name, "bf16")
    ]
    assert alone[0] > alone[1]


def test_local_models_are_planned_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "pocket-chat", "--memory", "1GB", "--context", "1k"]) == 0
    assert "1,115,968" in capsys.readouterr().out
    code = "import sys, motet_cli.planning.plan; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, timeout=60
        ).returncode
        == 0
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "MODEL: 'nowhere'"),
        (["pocket-chat", "--gpu", "Z80"], "--gpu: 'Z80'"),
        (["pocket-chat", "--memory", "much"], "--memory: 'much'"),
        (["pocket-chat", "--context", "1M"], "--context: '1M'"),
        (["pocket-chat", "--context", "1k", "--memory", "9MB"], "memory=8.58 MiB"),
        (["pocket-chat", "--block-size", "0"], "--block-size: 0"),
    ],
)
def test_wrong_options_are_rejected(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *args]) == 2
    assert message in capsys.readouterr().err


def test_bytes_are_parsed_and_formatted() -> None:
    assert [parse_bytes(text, "x") for text in ("24GB", "24GiB", "1.5k", "7")] == [
        24 * 10**9,
        24 << 30,
        1500,
        7,
    ]
    assert [format_bytes(number) for number in (1 << 30, 3 << 19, 512)] == [
        "1.00 GiB",
        "1.50 MiB",
        "0.50 KiB",
    ]


def test_this_cpu_is_measured() -> None:
    assert read_bandwidth(1, nbytes=8 << 20, seconds=0.05) > 1e8
    cpu = this_cpu(threads=1, bandwidth=1e9)
    assert cpu.bandwidth == 1e9
    assert cpu.int8 >= cpu.bf16 > 1e9
