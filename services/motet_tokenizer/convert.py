"""Make a tokenizer.json for a checkpoint that has its vocabulary in an older format.

    python -m motet_tokenizer.convert FOLDER [TARGET]

prints a folder with links to all files of the checkpoint and, beside them, what transformers makes
of `tokenizer.model` (SentencePiece or tiktoken), of Mistral's `tekken.json`, or of a vocabulary with
merges. It is made once and kept under `MOTET_CACHE`. An error goes to stderr, with exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from motet_models.checkpoints import derived
from motet_models.checkpoints.vocabularies import VOCABULARIES, find_vocabulary
from motet_shared.errors import ConfigError


def convert(folder: Path, target: Path) -> Path:
    """Write a checkpoint folder with a tokenizer.json to `target`, and return it.

    The other files are links to those of `folder`. Raises ConfigError if there is no known
    vocabulary or transformers cannot convert it.
    """
    folder = derived.absolute(folder)
    vocabulary = find_vocabulary(folder)
    if vocabulary is None:
        raise ConfigError(
            f"{folder}: no tokenizer.json, nor a vocabulary to make one of ({', '.join(VOCABULARIES)})"
        )
    files = derived.files_of(folder)

    def write(made: Path) -> None:
        _load(vocabulary).save_pretrained(made)
        for path in files:
            if not (made / path.name).exists():
                (made / path.name).symlink_to(path)

    return derived.TOKENIZER.make(files, target, write)


def _load(vocabulary: Path) -> Any:
    from transformers import AutoTokenizer
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    try:
        if vocabulary.name == "tekken.json":
            tokenizer: Any = convert_tekken_tokenizer(str(vocabulary))
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                vocabulary.parent, trust_remote_code=False, mistral_format=False
            )
    except Exception as error:  # a converter may raise anything for a damaged file
        raise ConfigError(
            f"{vocabulary}: cannot be converted to a tokenizer.json: {error}; give a checkpoint with one"
        ) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(
            f"{vocabulary}: {type(tokenizer).__name__} has no tokenizer.json; give a checkpoint with one"
        )
    return tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Print the folder; return 2 with the reason on stderr if nothing can be converted."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # as in `__main__`
    parser = argparse.ArgumentParser(prog="motet_tokenizer.convert", description=__doc__)
    parser.add_argument("folder", type=Path, help="the checkpoint folder")
    parser.add_argument("target", type=Path, nargs="?", help="the folder (under MOTET_CACHE)")
    args = parser.parse_args(argv)
    target = args.target or derived.TOKENIZER.target(args.folder)
    try:
        print(convert(args.folder, target))
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
