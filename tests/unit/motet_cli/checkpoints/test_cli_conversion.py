"""What `--llm` takes besides folders of safetensors: GGUF files and vocabularies in older formats."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from motet_cli.checkpoints import conversion
from motet_cli.checkpoints import model_folders as models
from motet_cli.hub import selection
from motet_cli.hub.reference import HubReference
from motet_cli.main import main
from motet_models.checkpoints import derived
from motet_shared.errors import ConfigError
from support.checkpoints.gguf_files import write_qwen3
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.checkpoints.sentencepieces import VOCAB, write_sentencepiece


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_qwen3(tiny_checkpoint("qwen3", tmp_path / "source"), tmp_path / "tiny-Q8_0.gguf")


def test_a_lone_gguf_file_is_served_under_its_name(
    gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.resolve(str(gguf))
    assert model.name == "tiny-Q8_0"
    assert model.path.is_relative_to(cache)
    assert not models.missing_parts(model.path)
    with monkeypatch.context() as context:  # from here on nothing is converted again
        context.setattr(conversion, "_run", None)
        assert models.resolve(f"mine={gguf}").name == "mine"
        assert models.locate(str(gguf), "--speculate")[1] == model.path
    assert derived.GGUF.find(gguf) == model.path
    os.utime(gguf, (1, 1))
    assert derived.GGUF.find(gguf) is None


@pytest.mark.long
def test_plan_reads_a_gguf_file(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(gguf), "--memory", "2GB", "--context", "256"]) == 0
    assert "qwen3" in capsys.readouterr().out


@pytest.mark.long
def test_a_damaged_gguf_file_is_refused(gguf: Path) -> None:
    gguf.write_bytes(gguf.read_bytes()[:500])
    with pytest.raises(ConfigError) as raised:
        models.resolve(str(gguf))
    assert raised.value.param == "--llm"


def test_an_older_vocabulary_is_converted(tmp_path: Path, cache: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "old", vocab_size=VOCAB)
    write_sentencepiece(folder)
    model = models.resolve(str(folder))
    assert model.name == "old"
    assert (model.path / "tokenizer.json").is_file()
    assert model.path.is_relative_to(cache)
    assert derived.TOKENIZER.find(folder) == model.path
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert derived.TOKENIZER.find(folder) is None


def test_all_parts_of_a_split_file_are_chosen() -> None:
    paths = [f"q4-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    reference = HubReference(repository="a/b", file=paths[0])
    assert selection.select_files(reference, [*paths, "q8.gguf"]) == paths
    with pytest.raises(ConfigError):
        selection.select_files(reference, paths[:2])
