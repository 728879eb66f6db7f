"""Incremental detokenizing against decoding everything at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from motet_shared.text.pieces import build_pieces
from motet_tokenizer.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    FallbackDetokenizer,
    WindowDetokenizer,
)
from support.checkpoints.tiny_tokenizers import (
    EOS,
    byte_level,
    id_of,
    metaspace,
    sentencepiece,
    vocabulary,
)

EMOJI = [
    "👩‍🚀",
    "🏳️‍🌈",
    "👨‍👩‍👧‍👦",
    "é",
    "日本",
    "ﷺ",
    "\u0301",
    " ",
    "\n",
    "<|im_end|>",
    "<tool_call>",
    "日 x",
    "�",
]
TEXTS = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(EMOJI)), max_size=8).map("".join)


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """`ids` in pieces whose lengths are `cuts`, over and over."""
    pieces, at, turn = [], 0, 0
    while at < len(ids):
        size = cuts[turn % len(cuts)] if cuts else 1
        pieces.append(ids[at : at + size])
        at, turn = at + size, turn + 1
    return pieces


def decoded(detokenizer: Detokenizer, chunks: list[list[int]]) -> str:
    return "".join([detokenizer.feed(chunk) for chunk in chunks]) + detokenizer.flush()


BYTES, LLAMA, GEMMA = (
    vocabulary(tokenizer) for tokenizer in (byte_level(), sentencepiece(), sentencepiece(False))
)
CUTS = st.lists(st.integers(1, 4), min_size=1, max_size=4)
ANY_IDS = st.lists(st.integers(0, BYTES.size - 1), max_size=40)
SP_IDS = st.lists(st.integers(0, LLAMA.size - 1), max_size=40)


@given(TEXTS, CUTS)
def test_byte_level_text_comes_back(text: str, cuts: list[int]) -> None:
    ids = byte_level().encode(text).ids
    expected = byte_level().decode(ids)
    assert decoded(BYTES.detokenizer(), chunked(ids, cuts)) == expected
    if not any(special in text for special in ("<|im_end|>", "<|im_start|>", "<|endoftext|>")):
        assert expected == text


@given(ANY_IDS, CUTS)
def test_byte_level_ids_that_are_no_utf8(ids: list[int], cuts: list[int]) -> None:
    assert decoded(BYTES.detokenizer(), chunked(ids, cuts)) == byte_level().decode(ids)


@given(ANY_IDS)
def test_what_has_come_out_depends_on_the_ids_alone(ids: list[int]) -> None:
    single, whole = BYTES.detokenizer(), BYTES.detokenizer()
    assert "".join([single.feed([i]) for i in ids]) == whole.feed(ids)


@given(TEXTS)
def test_no_character_is_split(text: str) -> None:
    detokenizer = BYTES.detokenizer()
    ids = byte_level().encode(text).ids
    pieces = [detokenizer.feed([i]) for i in ids]
    if "�" not in text:
        assert "�" not in "".join(pieces)


@given(TEXTS, CUTS)
@pytest.mark.parametrize("strip", [True, False])
def test_sentencepiece_text_comes_back(strip: bool, text: str, cuts: list[int]) -> None:
    tokenizer = sentencepiece(strip)
    ids = tokenizer.encode(text).ids
    model = LLAMA if strip else GEMMA
    assert isinstance(model.detokenizer(), FallbackDetokenizer)
    assert decoded(model.detokenizer(), chunked(ids, cuts)) == tokenizer.decode(ids)


def streamed_reference(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Full decoding, except that valid characters beside invalid bytes are kept: they have been sent already."""
    parts: list[str] = []
    run = bytearray()

    def close() -> None:
        at = 0
        while at < len(run):
            for size in (1, 2, 3, 4):
                try:
                    parts.append(bytes(run[at : at + size]).decode())
                except UnicodeDecodeError:
                    continue
                break
            else:
                parts.append("�")
                size = 1
            at += size
        run.clear()

    for token in (str(tokenizer.id_to_token(i)) for i in ids if i > EOS):
        if token.startswith("<0x"):
            run.append(int(token[3:5], 16))
        else:
            close()
            parts.append(token.replace("▁", " "))
    close()
    return "".join(parts).removeprefix(" ")


@given(SP_IDS, CUTS)
def test_sentencepiece_ids_that_are_no_utf8(ids: list[int], cuts: list[int]) -> None:
    assert decoded(LLAMA.detokenizer(), chunked(ids, cuts)) == streamed_reference(
        sentencepiece(), ids
    )


@given(st.lists(st.integers(259, LLAMA.size - 1), max_size=20))
def test_a_continued_text_keeps_its_leading_space(ids: list[int]) -> None:
    continued = decoded(LLAMA.detokenizer(continues=True), [ids])
    assert continued == sentencepiece(False).decode(ids)
    assert decoded(LLAMA.detokenizer(), [ids]) == continued.removeprefix(" ")


@given(st.lists(st.integers(0, 31), max_size=30), CUTS)
def test_any_other_decoder(ids: list[int], cuts: list[int]) -> None:
    model = vocabulary(metaspace())
    assert isinstance(model.detokenizer(), WindowDetokenizer)
    ids = [26 + 4, *ids]  # a first token that is not just a space
    assert decoded(model.detokenizer(), chunked(ids, cuts)) == metaspace().decode(ids)


def test_wordpiece_is_decoded_in_windows() -> None:
    vocab = {
        token: i for i, token in enumerate(["[UNK]", "draw", "##ing", "a", "star", "##s", "."])
    }
    tokenizer = Tokenizer(models.WordPiece(vocab))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    assert build_pieces(tokenizer, len(vocab)) is None
    ids = [1, 2, 3, 4, 5, 6]
    assert decoded(
        WindowDetokenizer(tokenizer, frozenset()), [[i] for i in ids]
    ) == tokenizer.decode(ids)


def test_special_tokens_have_no_text_but_tool_tags_do() -> None:
    tag = id_of(byte_level(), "<tool_call>")
    assert BYTES.detokenizer().feed([0, 1, tag, EOS]) == "<tool_call>"
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_special_tokens(["<tool_call>", "<hidden>"])
    ids = [tag, id_of(tokenizer, "<hidden>")]
    assert vocabulary(tokenizer).detokenizer().feed(ids) == "<tool_call>"


def test_ids_without_a_token_have_no_text_and_ids_outside_raise() -> None:
    pieces = build_pieces(byte_level(), 1000)
    assert pieces is not None
    assert ByteDetokenizer(pieces).feed([999]) == ""
    with pytest.raises(IndexError):
        ByteDetokenizer(pieces).feed([1000])


def test_bytes_of_tokens_are_exact() -> None:
    ids = byte_level().encode("a 👩‍🚀<|im_end|>").ids
    assert b"".join([BYTES.token_bytes(i) for i in ids]) == "a 👩‍🚀<|im_end|>".encode()
    assert LLAMA.token_bytes(3 + 0xF0) == b"\xf0"
    assert vocabulary(metaspace()).token_bytes(4) == "▁".encode()
