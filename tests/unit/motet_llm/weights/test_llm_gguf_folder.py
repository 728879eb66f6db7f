"""A lone GGUF file becomes a checkpoint folder: config, tokenizer, chat template and tensors."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from motet_llm.weights.gguf.folder import default_folder, make_folder
from motet_llm.weights.gguf.header import read_header
from motet_shared.errors import ConfigError
from support.checkpoints.gguf_files import write_qwen3 as write
from support.checkpoints.language_checkpoints import CHAT_TEMPLATE, EOS, SPECIAL, tiny_checkpoint
from support.checkpoints.quantized_checkpoints import answer, engine_of


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("source"))


def test_the_folder_answers_as_the_original(source: Path, tmp_path: Path) -> None:
    folder = make_folder(write(source, tmp_path / "lone.gguf"), tmp_path / "made")
    assert answer(engine_of(folder)) == answer(engine_of(source))


def test_config_is_the_original(source: Path, tmp_path: Path) -> None:
    folder = make_folder(write(source, tmp_path / "lone.gguf"), tmp_path / "made")
    found, due = (AutoConfig.from_pretrained(place).to_dict() for place in (folder, source))
    for name in ("rope_parameters", "rms_norm_eps", "head_dim", "vocab_size", "eos_token_id"):
        assert found[name] == due[name], name


def test_tokenizer_and_template_are_the_original(source: Path, tmp_path: Path) -> None:
    folder = make_folder(write(source, tmp_path / "lone.gguf"), tmp_path / "made")
    found, due = (AutoTokenizer.from_pretrained(place) for place in (folder, source))
    text = f"Grüße, {SPECIAL[2]} 12345"
    assert found(text).input_ids == due(text).input_ids
    assert found.chat_template == CHAT_TEMPLATE
    assert found.eos_token_id == EOS


def test_what_ends_a_reply_and_recommended_sampling(source: Path, tmp_path: Path) -> None:
    file = write(source, tmp_path / "lone.gguf", temp=0.5, top_p=0.75)
    folder = make_folder(file, tmp_path / "made")
    generation = json.loads((folder / "generation_config.json").read_text())
    # <|endoftext|> and <|im_end|> both end replies, whichever the file names.
    assert generation == {
        "eos_token_id": [EOS - 2, EOS],
        "temperature": 0.5,
        "top_p": 0.75,
        "do_sample": True,
    }


def test_a_folder_is_kept_until_its_file_changes(source: Path, tmp_path: Path) -> None:
    file = write(source, tmp_path / "lone.gguf")
    folder = make_folder(file, tmp_path / "made")
    first = (folder / "config.json").stat().st_ino
    assert (make_folder(file, folder) / "config.json").stat().st_ino == first
    os.utime(file, (1, 1))
    make_folder(file, folder)
    assert (folder / "config.json").stat().st_ino != first


def test_a_folder_of_something_else_is_left_alone(source: Path, tmp_path: Path) -> None:
    file, other = write(source, tmp_path / "lone.gguf"), tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"gguf_source\.json"):
        make_folder(file, other)
    assert (other / "notes.txt").read_text() == "mine"


def test_a_linked_file_keeps_its_name(source: Path, tmp_path: Path) -> None:
    """A hub's cache holds links to blobs that are named by their hashes."""
    blob = write(source, tmp_path / "lone.gguf").rename(tmp_path / "0123abcd")
    link = tmp_path / "snapshot.gguf"
    link.symlink_to(blob)
    folder = make_folder(link, tmp_path / "made")
    assert (folder / "snapshot.gguf").is_file()


@pytest.mark.long
def test_the_command_prints_the_folder(source: Path, tmp_path: Path) -> None:
    file = write(source, tmp_path / "lone.gguf")
    environment = {**os.environ, "MOTET_CACHE": str(tmp_path / "cache")}
    argv = [sys.executable, "-m", "motet_llm.weights.gguf"]
    done = subprocess.run(
        [*argv, str(file)], capture_output=True, text=True, env=environment, timeout=100
    )
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(tmp_path / "cache")
    assert (folder / "lone.gguf").is_file()
    failed = subprocess.run(
        [*argv, str(tmp_path / "none.gguf")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
    )
    assert failed.returncode == 2
    assert "none.gguf" in failed.stderr


def test_default_folders_differ_by_path(tmp_path: Path) -> None:
    assert default_folder(tmp_path / "a" / "m.gguf") != default_folder(tmp_path / "b" / "m.gguf")


# ---------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", ""),
        (b"GGML" + bytes(40), "GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), f"{2**60}"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), f"{2**60}"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**50) + bytes(20), ""),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**59),
            f"{2**59}",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "general.architecture"),
    ],
)
def test_headers_that_lie_are_refused(data: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"bad\.gguf.*{named}"):
        read_header(path)


def test_every_cut_is_refused(source: Path, tmp_path: Path) -> None:
    whole = write(source, tmp_path / "lone.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (10, 30, 100, 1000, 5000, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            read_header(path)


def test_an_absent_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "m-00001-of-00002.gguf").touch()
    with pytest.raises(ConfigError, match=r"m-00002-of-00002\.gguf"):
        read_header(tmp_path / "m-00001-of-00002.gguf")
