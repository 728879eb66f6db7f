"""Vocabularies in older formats become a tokenizer.json that gives the same tokens, once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece

from motet_models.checkpoints.vocabularies import find_vocabulary
from motet_shared.errors import ConfigError
from motet_tokenizer.convert import convert
from motet_tokenizer.encoding.vocabulary import Vocabulary
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.checkpoints.sentencepieces import VOCAB, write_sentencepiece, write_tekken

TEXTS = ("a red circle", "two  spaces, künstlich 😀", "ends in space \n and a line ")


def test_a_sentencepiece_model_gives_its_own_tokens(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", vocab_size=VOCAB)
    write_sentencepiece(folder)
    made = convert(folder, tmp_path / "made")
    assert (made / "model.safetensors").resolve() == folder / "model.safetensors"
    vocabulary = Vocabulary.load("tiny", str(made))
    theirs = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    for text in TEXTS:
        ids = vocabulary.backend.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text)
        assert vocabulary.decode(ids) == text


def test_tekken_gives_its_own_tokens(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", vocab_size=VOCAB)
    write_tekken(folder)
    vocabulary = Vocabulary.load("tiny", str(convert(folder, tmp_path / "made")))
    ids = vocabulary.backend.encode("the thing", add_special_tokens=False).ids
    assert [vocabulary.token_bytes(i) for i in ids] == [b"the", b" th", b"ing"]
    assert vocabulary.decode(ids) == "the thing"
    assert not vocabulary.template.source


def test_what_was_made_is_kept_until_the_checkpoint_changes(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", vocab_size=VOCAB)
    write_tekken(folder)
    made = convert(folder, tmp_path / "made")
    first = (made / "tokenizer.json").stat().st_ino
    assert (convert(folder, made) / "tokenizer.json").stat().st_ino == first
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    convert(folder, made)
    assert (made / "tokenizer.json").stat().st_ino != first
    assert Vocabulary.load("tiny", str(made)).template.source


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json"])
def test_a_damaged_vocabulary_is_refused_by_its_path(name: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / name).write_bytes(b"\x0a\xff\xff\xff\xff\xff")
    with pytest.raises(ConfigError) as raised:
        convert(folder, tmp_path / "made")
    assert name in raised.value.message
    assert not (tmp_path / "made").exists()


def test_the_command_prints_the_folder_or_the_reason(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", vocab_size=VOCAB)
    (folder / "tokenizer.json").unlink()
    command = [sys.executable, "-m", "motet_tokenizer.convert", str(folder), str(tmp_path / "made")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert str(folder) in done.stderr
    assert find_vocabulary(folder) is None
