"""Test the module that makes torchaudio importable beside a CPU-only torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from motet_cli.supervision import torchaudio_fix

CUDA_EXTENSION = "an ELF file that needs libtorch_cuda.so"


def make_site_packages(root: Path, *, cuda: str | None) -> Path:
    """Create torch and torchaudio as an installation leaves them, with an unloadable extension."""
    files = {
        "torch/__init__.py": "",
        "torch/version.py": f"__version__ = '2.13.0'\ncuda = {cuda!r}\nhip = None\n",
        "torchaudio/__init__.py": "",
        "torchaudio/lib/__init__.py": "",
        "torchaudio/lib/_torchaudio.abi3.so": CUDA_EXTENSION,
        "torchaudio/lib/libtorchaudio.abi3.so": CUDA_EXTENSION,
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def extensions(site_packages: Path) -> list[str]:
    return sorted(path.name for path in (site_packages / "torchaudio" / "lib").glob("*.so"))


BOTH = ["_torchaudio.abi3.so", "libtorchaudio.abi3.so"]


def test_moves_extensions_that_cannot_load_beside_cpu_torch(tmp_path: Path) -> None:
    site_packages = make_site_packages(tmp_path, cuda=None)
    moved = torchaudio_fix.fix(site_packages)
    assert [path.name for path in moved] == BOTH
    assert all(path.read_text() == CUDA_EXTENSION for path in moved)
    assert extensions(site_packages) == []
    assert (site_packages / "torchaudio/lib/__init__.py").exists()


def test_is_idempotent_and_undoable(tmp_path: Path) -> None:
    site_packages = make_site_packages(tmp_path, cuda=None)
    assert torchaudio_fix.fix(site_packages)
    assert torchaudio_fix.fix(site_packages) == []
    assert [path.name for path in torchaudio_fix.undo(site_packages)] == BOTH
    assert extensions(site_packages) == BOTH
    assert torchaudio_fix.undo(site_packages) == []


def test_leaves_a_cuda_torch_alone(tmp_path: Path) -> None:
    site_packages = make_site_packages(tmp_path, cuda="13.0")
    assert torchaudio_fix.fix(site_packages) == []
    assert extensions(site_packages) == BOTH


def test_leaves_an_extension_for_the_cpu_alone(tmp_path: Path) -> None:
    site_packages = make_site_packages(tmp_path, cuda=None)
    for name in BOTH:
        (site_packages / "torchaudio/lib" / name).write_text(
            "an ELF file that needs libtorch_cpu.so"
        )
    assert torchaudio_fix.fix(site_packages) == []
    assert extensions(site_packages) == BOTH


@pytest.mark.parametrize("missing", ["torch", "torchaudio"])
def test_has_nothing_to_do_where_either_is_missing(tmp_path: Path, missing: str) -> None:
    site_packages = make_site_packages(tmp_path, cuda=None)
    (site_packages / missing).rename(site_packages / f"not_{missing}")
    assert torchaudio_fix.fix(site_packages) == []


def test_command_line(tmp_path: Path) -> None:
    site_packages = make_site_packages(tmp_path, cuda=None)
    command = [sys.executable, "-m", "motet_cli.supervision.torchaudio_fix"]
    command += ["--site-packages", str(site_packages)]
    assert subprocess.check_output(command, text=True).count("lib.disabled") == 2
    assert subprocess.check_output(command, text=True) == ""
    subprocess.run([*command, "--undo"], check=True)
    assert extensions(site_packages) == BOTH


@pytest.mark.long
def test_torchaudio_resamples_here() -> None:
    """Import torchaudio in a new process and resample a tone from 48 to 16 kHz."""
    code = """
import math, torch, torchaudio, transformers
seconds = torch.arange(4800) / 48000
tone = torch.sin(2 * math.pi * 440 * seconds)
heard = torchaudio.functional.resample(tone, 48000, 16000)
due = torch.sin(2 * math.pi * 440 * torch.arange(1600) / 16000)
assert heard.shape == due.shape, heard.shape
assert (heard - due)[100:-100].abs().max() < 0.02
from transformers import LlamaForCausalLM
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
