"""Make torchaudio importable beside a CPU-only torch.

torchaudio's wheel is linked against CUDA's torch. Beside a CPU-only torch its extension files fail to load, so that
`import torchaudio` fails, and with it every part of transformers that imports torchaudio when it is installed. Its
Python parts (resampling, mel, filters) need no extension, and torchaudio works without one: this moves the files
aside, to `torchaudio/lib.disabled`. It touches nothing where torch has CUDA or ROCm, or where the extension loads.

    python scripts/fix_torchaudio.py           # idempotent
    python scripts/fix_torchaudio.py --undo    # puts the files back
"""

import argparse
import os
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

PROBE = "import ctypes, sys, torch\nfor path in sys.argv[1:]: ctypes.CDLL(path)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--undo", action="store_true", help="put the extension files back")
    parser.add_argument("--site-packages", type=Path, default=Path(sysconfig.get_path("platlib")))
    options = parser.parse_args()
    moved = undo(options.site_packages) if options.undo else fix(options.site_packages)
    for path in moved:
        print(f"fix_torchaudio: moved to {path}")


def fix(site_packages: Path) -> list[Path]:
    """Move aside extension files that cannot load; returns where they are now (nothing to do: an empty list)."""
    lib = site_packages / "torchaudio" / "lib"
    extensions = sorted(lib.glob("*.so"))
    if not extensions or not _is_cpu_only(site_packages) or _loads(extensions, site_packages):
        return []
    return _move(extensions, lib.with_name("lib.disabled"))


def undo(site_packages: Path) -> list[Path]:
    """Put back what `fix` moved; returns where the files are now."""
    lib = site_packages / "torchaudio" / "lib"
    return _move(sorted(lib.with_name("lib.disabled").glob("*.so")), lib)


def _is_cpu_only(site_packages: Path) -> bool:
    version_file = site_packages / "torch" / "version.py"
    if not version_file.exists():
        return False
    version = runpy.run_path(str(version_file))
    return version.get("cuda") is None and version.get("hip") is None


def _loads(extensions: list[Path], site_packages: Path) -> bool:
    """In a process of its own: a library that fails to load can take its process along."""
    command = [sys.executable, "-c", PROBE, *map(str, extensions)]
    environment = os.environ | {"PYTHONPATH": str(site_packages)}
    return (
        subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
    )


def _move(files: list[Path], folder: Path) -> list[Path]:
    if files:
        folder.mkdir(exist_ok=True)
    return [file.replace(folder / file.name) for file in files]


if __name__ == "__main__":
    main()
