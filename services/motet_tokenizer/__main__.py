"""`python -m motet_tokenizer --model PATH`: run one tokenizer process."""

from __future__ import annotations

import os
import sys

from motet_shared.starts import importing


def main() -> None:
    # Where torch is installed for other services, transformers would load it here too: two seconds of start-up and
    # 150 MB for nothing. None says that it cannot be imported.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # transformers would warn that it is missing

    with importing():
        from motet_shared.actor import run
        from motet_tokenizer.config import TokenizerConfig
        from motet_tokenizer.service import Tokenizer

    run(Tokenizer, TokenizerConfig)


if __name__ == "__main__":
    main()
