"""Make torchaudio importable beside a CPU-only torch.

torchaudio's wheel is linked against CUDA's torch. Beside a CPU-only torch its extension files fail
to load, so that `import torchaudio` fails, and with it every part of transformers that imports
torchaudio when it is installed. Its Python parts (resampling, mel, filters) need no extension, and
torchaudio works without one: `fix` moves the files to `torchaudio/lib.disabled`. It changes nothing
if torch has CUDA or ROCm, or if the extension is linked only against torch's CPU libraries. It
imports nothing and takes milliseconds, so that `motet up` runs it at every start.

    python -m motet_cli.supervision.torchaudio_fix           # idempotent
    python -m motet_cli.supervision.torchaudio_fix --undo    # moves the files back
"""

from __future__ import annotations

import argparse
import runpy
from importlib.util import find_spec
from pathlib import Path

# Libraries that CUDA's torch brings, as the dynamic section of an extension names them.
_CUDA_LIBRARIES = (b"libtorch_cuda.so", b"libc10_cuda.so", b"libcudart.so")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--undo", action="store_true", help="move the extension files back")
    parser.add_argument(
        "--site-packages",
        type=Path,
        help="folder to change (default: where torchaudio is installed)",
    )
    options = parser.parse_args()
    folder = options.site_packages or find_site_packages()
    if folder is None:
        return
    for path in undo(folder) if options.undo else fix(folder):
        print(f"torchaudio_fix: moved to {path}")


def find_site_packages() -> Path | None:
    """Return the folder of the installed torchaudio without importing it; None if there is none."""
    spec = find_spec("torchaudio")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


def fix(site_packages: Path) -> list[Path]:
    """Move extension files that cannot be loaded; return their new paths.

    Raises OSError if the folder cannot be written.
    """
    lib = site_packages / "torchaudio" / "lib"
    extensions = sorted(lib.glob("*.so"))
    if not any(map(_needs_cuda, extensions)) or not _is_cpu_only(site_packages):
        return []
    return _move(extensions, lib.with_name("lib.disabled"))


def undo(site_packages: Path) -> list[Path]:
    """Move back the files that `fix` moved; return their new paths."""
    lib = site_packages / "torchaudio" / "lib"
    return _move(sorted(lib.with_name("lib.disabled").glob("*.so")), lib)


def _is_cpu_only(site_packages: Path) -> bool:
    version_file = site_packages / "torch" / "version.py"
    if not version_file.exists():
        return False
    version = runpy.run_path(str(version_file))
    return version.get("cuda") is None and version.get("hip") is None


def _needs_cuda(extension: Path) -> bool:
    content = extension.read_bytes()
    return any(name in content for name in _CUDA_LIBRARIES)


def _move(files: list[Path], folder: Path) -> list[Path]:
    if files:
        folder.mkdir(exist_ok=True)
    return [file.replace(folder / file.name) for file in files]


if __name__ == "__main__":
    main()
