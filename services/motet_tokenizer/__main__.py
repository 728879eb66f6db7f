"""Run one tokenizer process: `python -m motet_tokenizer --model PATH`."""

from __future__ import annotations

import os
import sys

from motet_shared.process.starts import importing


def main() -> None:
    # Where torch is installed for other services, transformers would load it here too: two seconds
    # of start-up and 150 MB for nothing. None makes its import fail.
    sys.modules["torch"] = None  # type: ignore[assignment]
    # Else transformers warns that torch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

    with importing():
        from motet_shared.process.actor import run
        from motet_tokenizer.config import TokenizerConfig
        from motet_tokenizer.service import Tokenizer

    run(Tokenizer, TokenizerConfig)


if __name__ == "__main__":
    main()
