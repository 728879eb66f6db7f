"""Convert what a model is given as into the checkpoint folder that services read.

The services that know the formats do it, each as a command of its own that prints the folder, which
is kept under `MOTET_CACHE`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from motet_models.checkpoints import derived
from motet_models.checkpoints.vocabularies import find_vocabulary
from motet_shared.errors import ConfigError

GGUF = ".gguf"
_GGUF_READER = "motet_llm.weights.gguf"
_TOKENIZER_MAKER = "motet_tokenizer.convert"
_PART = re.compile(r"-\d{5}-of-\d{5}$")


def is_gguf(path: Path) -> bool:
    """Return True for a GGUF file."""
    return path.suffix == GGUF and path.is_file()


def gguf_name(path: Path) -> str:
    """Return the name of a model in a GGUF file, or in several parts of one."""
    return _PART.sub("", path.stem)


def gguf_folder(path: Path, flag: str) -> Path:
    """Return the checkpoint folder of a GGUF file. Raises ConfigError if it cannot be served."""
    return derived.GGUF.find(path) or _run(_GGUF_READER, path, flag)


def with_tokenizer(folder: Path, flag: str) -> Path:
    """Return the folder, or one with a tokenizer.json made of a vocabulary in an older format.

    Raises ConfigError if the vocabulary cannot be converted.
    """
    if (folder / "tokenizer.json").is_file() or find_vocabulary(folder) is None:
        return folder
    return derived.TOKENIZER.find(folder) or _run(_TOKENIZER_MAKER, folder, flag)


def _run(module: str, path: Path, flag: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", module, str(path)], capture_output=True, text=True, check=False
    )
    lines = (done.stdout if not done.returncode else done.stderr).strip().splitlines()
    last = lines[-1] if lines else f"{module} ended with status {done.returncode}"
    if done.returncode:
        raise ConfigError(f"{flag}: {last}", param=flag)
    return Path(last)
