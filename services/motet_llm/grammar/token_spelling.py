"""Spell a model's tokens as bytes, in the form that llguidance expects."""

from __future__ import annotations

from collections.abc import Iterable

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from motet_shared.errors import UnsupportedParameter
from motet_shared.text.pieces import build_pieces, hidden_ids

# Kinds of text that most tokens belong to: a mask that allows a whole kind is built without looking
# at each token.
_KINDS = [r"[a-z]{1,10}", r"[a-zA-Z ]{1,10}", *LLTokenizer.general_slices()]


class Spelling:
    """Hold the spelling of `vocab` tokens. `engine` has one more: the end of the grammar.

    Each request maps that end to stop tokens of its own. A token without text (special tokens and
    all of `eos_ids`) is never part of a text. Raises UnsupportedParameter if the tokenizer does not
    decode token by token.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos_ids: Iterable[int] = ()):
        pieces = build_pieces(tokenizer, vocab)
        if pieces is None:
            raise UnsupportedParameter(
                "the decoder of this model's tokenizer does not work token by token, so no reply can be held to a "
                "grammar; leave the grammar out"
            )
        self.vocab = vocab
        textless = hidden_ids(tokenizer) | set(eos_ids)
        tokens = [b"" if token in textless else data for token, data in enumerate(pieces.data)]
        specials = [token for token, data in enumerate(tokens) if not data]
        for token in specials:
            tokens[token] = (tokenizer.id_to_token(token) or f"<unused {token}>").encode()
        adapter = _TokenizerAdapter([*tokens, b"<end of the grammar>"], [*specials, vocab])
        self.engine = LLTokenizer(
            TokenizerWrapper(adapter), n_vocab=vocab + 1, eos_token=[vocab], slices=_KINDS
        )

    @classmethod
    def load(cls, folder: str, vocab: int, eos_ids: Iterable[int]) -> Spelling:
        """Return the spelling of a checkpoint.

        Raises UnsupportedParameter if it has no tokenizer, or one that does not decode token by
        token.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            raise UnsupportedParameter(
                f"this model's folder has no tokenizer that grammars need: {error}"
            ) from error
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedParameter(
                "grammars need a tokenizer.json in the folder of this model; convert its own"
            )
        return cls(backend, vocab, eos_ids)


class _TokenizerAdapter:
    """Provide the attributes that `TokenizerWrapper` reads."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int]):
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = len(tokens) - 1

    def __call__(self, text: bytes | str) -> list[int]:
        """Return no tokens: the model spells forced text, so llguidance never encodes any."""
        return []
