"""Encoder-decoder families beside Whisper say what transformers says, in any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoFeatureExtractor, AutoTokenizer

from motet_asr.models.registry import RECOGNIZERS
from motet_shared.errors import BadRequest, ConfigError, UnsupportedParameter
from support.checkpoints.asr_checkpoints import RATE, noise
from support.checkpoints.recognizers import TINY, Checkpoints
from support.engine.recognizer_runs import add, engine_of, run
from support.running.refusals import refuses

SECONDS = (0.33, 1.04, 1.7, 0.33, 2.3)
SOUNDS = [noise(seconds, index) for index, seconds in enumerate(SECONDS)]
LONGEST = 40  # tokens of a tiny decoder, prompt included
BEGIN = ["<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>"]
END = ["<|pnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>"]


class Reference:
    """transformers' own answers, one window at a time."""

    def __init__(self, path: Path, kind: str):
        model_class = getattr(transformers, RECOGNIZERS[kind].class_name)
        self.model = model_class.from_pretrained(path).eval()
        self.extractor = AutoFeatureExtractor.from_pretrained(path)
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    def tokens(self, sound: Any, prompt: list[str], longest: int, **options: Any) -> list[int]:
        inputs = self.extractor(sound, sampling_rate=RATE, return_tensors="pt", **options)
        inputs.pop("audio_chunk_index", None)
        if prompt:
            ids = self.tokenizer.convert_tokens_to_ids(prompt)
            inputs["decoder_input_ids"] = torch.tensor([ids])
        found = self.model.generate(**inputs, max_length=longest)[0].tolist()
        eos = self.model.generation_config.eos_token_id
        return [token for token in found[max(len(prompt), 1) :] if token != eos]


def prompt_of(kind: str, spoken: str, written: str) -> list[str]:
    space = ["▁"] if kind == "cohere_asr" else []
    return [*space, *BEGIN, f"<|{spoken}|>", f"<|{written}|>", *END]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", ["canary", "cohere_asr"])
def test_prompted_decoders_are_exact_in_any_company(folders: Checkpoints, kind: str) -> None:
    engine, reference = engine_of(folders[kind], max_rows=3), Reference(folders[kind], kind)
    assert engine.family.languages == {"en", "de", "fr"}
    tasks = {"transcribe": "fr", **({"translate": "en"} if kind == "canary" else {})}
    said = set()
    for task, written in tasks.items():
        for key, sound in enumerate(SOUNDS):
            add(engine, key, sound, language="fr", task=task)
        engine.cancel(3)
        heard = run(engine)
        assert set(heard) == {0, 1, 2, 4}
        for key, result in heard.items():
            prompt = prompt_of(kind, "fr", written)
            assert result.tokens == reference.tokens(SOUNDS[key], prompt, LONGEST)
            assert result.language == "fr"
            said.add(tuple(result.tokens))
    assert len(said) > 3


def test_moonshine_streaming_is_exact_in_any_company(folders: Checkpoints) -> None:
    kind = "moonshine_streaming"
    engine, reference = engine_of(folders[kind], max_rows=3), Reference(folders[kind], kind)
    for key, sound in enumerate(SOUNDS):
        add(engine, key, sound)
    heard = run(engine)
    for key, sound in enumerate(SOUNDS):
        longest = max(int(SECONDS[key] * 6.5), 2)
        wanted = reference.tokens(sound, [], longest, pad_to_multiple_of=80, padding=True)
        assert heard[key].tokens == wanted
    assert len({token for result in heard.values() for token in result.tokens}) > 4


def test_languages_are_named_not_detected(folders: Checkpoints) -> None:
    engine = engine_of(folders["canary"])
    assert engine.family.code("German") == "de"
    assert engine.family.language_name("de") == "german"
    for language in ("", "es"):
        with refuses(BadRequest, "language"):
            add(engine, 0, SOUNDS[0], language=language)
    with refuses(BadRequest, "task"):
        add(engine_of(folders["cohere_asr"]), 0, SOUNDS[0], language="de", task="translate")
    with refuses(UnsupportedParameter, "timestamp_granularities"):
        engine.family.check_words()


def test_a_tokenizer_without_the_prompt_s_tokens_is_refused(
    folders: Checkpoints, tmp_path: Path
) -> None:
    TINY["canary"](tmp_path)
    TINY["moonshine"](tmp_path / "other")
    (tmp_path / "tokenizer.json").write_text((tmp_path / "other" / "tokenizer.json").read_text())
    with refuses(ConfigError, "model"):
        engine_of(tmp_path)
