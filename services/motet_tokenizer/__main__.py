"""`python -m motet_tokenizer --model PATH`: run one tokenizer process."""

from __future__ import annotations

from motet_shared.actor import run
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.service import Tokenizer

if __name__ == "__main__":
    run(Tokenizer, TokenizerConfig)
