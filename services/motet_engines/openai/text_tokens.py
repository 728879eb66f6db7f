"""Turn text back into token ids, for servers that return no ids.

The ids spell the same text, but need not be those that the server's model chose: at each position
the longest token is taken.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from motet_shared.errors import ConfigError
from motet_shared.text.pieces import Pieces, build_pieces


class TextTokens:
    """Spell text in the tokens of one tokenizer."""

    def __init__(self, pieces: Pieces):
        self._pieces = pieces
        self._ids: dict[bytes, int] = {}
        for number, data in enumerate(pieces.data):
            if data and (pieces.text[number] != ""):
                self._ids.setdefault(data, number)
        self._longest = max(map(len, self._ids), default=0)
        self._last = ""

    @classmethod
    def load(cls, folder: Path) -> TextTokens:
        """Read tokenizer.json. Raises ConfigError if its tokens have no text of their own."""
        tokenizer = read_tokenizer(folder)
        pieces = build_pieces(tokenizer, tokenizer.get_vocab_size(with_added_tokens=True))
        if pieces is None or pieces.strip:
            raise ConfigError(
                "engine_route: the server returns no token ids, and text cannot be spelled in the"
                f" tokens of {str(folder)!r}; use a server with `return_token_ids`",
                param="engine_route",
            )
        return cls(pieces)

    def spell(self, text: str) -> list[int]:
        """Return ids whose pieces concatenate to the text; bytes that no token has are left out."""
        data, at = text.encode("utf-8", "replace"), 0
        found = []
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                if (number := self._ids.get(data[at : at + size])) is not None:
                    found.append(number)
                    at += size
                    break
            else:
                at += 1
        return found

    def data_of(self, ids: list[int]) -> bytes:
        """Return the bytes that ids spell; those outside the vocabulary and special ones spell none."""
        pieces, size = self._pieces.data, len(self._pieces.data)
        return b"".join([pieces[number] for number in ids if 0 <= number < size])


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model's folder. Raises ConfigError if there is none."""
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(
            f"model: cannot read {str(path)!r}: {error}; give a folder with tokenizer.json",
            param="model",
        ) from None
