"""Test the benchmark of speech, and run it on tiny models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, VitsModel

from benchmarks.engine.llm import transformers_dtype
from benchmarks.voice import voice
from benchmarks.voice.asr import (
    WHISPER_PYTHON,
    AsrFindings,
    AsrPlan,
    EngineRuns,
    asr_report,
    asr_targets,
)
from benchmarks.voice.checkpoint import vits_checkpoint, whisper_checkpoint
from benchmarks.voice.clips import clips
from benchmarks.voice.speech import RATE, questions, spoken
from benchmarks.voice.timing import WrongLength, measured
from benchmarks.voice.tts import (
    SHERPA,
    SHERPA_PYTHON,
    Stream,
    TtsFindings,
    TtsPlan,
    tts_report,
    tts_targets,
)
from benchmarks.voice.turns import (
    AUDIBLE,
    STAGES,
    Interruption,
    Loudspeaker,
    Turn,
    TurnsFindings,
    TurnsPlan,
    run_turns,
    turns_report,
    turns_targets,
)
from benchmarks.voice.vits_onnx import INPUTS, MODEL, TOKENS, Graph, vits_onnx
from motet_shared.quantiles import quantile


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


def tokens(runs: dict[str, Any]) -> list[int]:
    return [token for clip in runs["tokens"] for token in clip]


def engine_runs(
    name: str, one: list[float], eight: list[float], token_ids: list[int]
) -> EngineRuns:
    """Return runs over clips of 30 s that take these seconds, by round."""
    found = EngineRuns(name)
    for alone, together in zip(one, eight, strict=True):
        runs = [
            {"seconds": 30.0, "batch": batch, "whole": [taken, 99.0, 0.1], "said": [token_ids] * batch,
             "parts": {"features": [0.01], "encoder": [0.02]}}
            for batch, taken in ((1, alone), (8, together))
        ]  # fmt: skip
        found.take({"runs": runs, "note": ""})
    return found


def test_targets_compare_rounds_with_available_peers() -> None:
    found = AsrFindings(
        {
            "motet int8": engine_runs("motet int8", [1.0, 2.0, 1.0], [4.0, 4.0, 4.0], [1, 2, 3, 4]),
            "faster-whisper int8": engine_runs(
                "faster-whisper int8", [2.0, 2.0, 2.0], [6.0, 6.0, 6.0], [1, 2, 9, 4]
            ),
        },
        {"transformers pipeline, float32": "it failed"},
    )
    judged = {target.what: (target.value, target.met) for target in asr_targets(found, AsrPlan())}
    assert judged == {
        "motet int8 / faster-whisper int8, 1 × 30 s": (2.0, True),
        "motet int8 / faster-whisper int8, 8 × 30 s": (1.5, False),
    }
    text = asr_report(found, AsrPlan(clips=((30.0, 4),)))
    assert "| motet int8 | 100% | 30.0 | 60.0 |" in text
    assert "| faster-whisper int8 | 75% | 15.0 | 40.0 |" in text
    assert "10 / 20 / 970" in text
    assert "* transformers pipeline, float32 is absent: it failed" in text


def test_too_few_tokens_are_an_error() -> None:
    class Short:
        def whole(self, sounds: list[Any], tokens: int) -> list[list[int]]:
            return [[1] * (tokens - 1) for _ in sounds]

        def parts(self, sounds: list[Any]) -> dict[str, float]:
            return {"features": 0.0, "encoder": 0.0}

        def describe(self) -> str:
            return ""

    task = {"checkpoints": [{"seconds": 1.0, "tokens": 4}], "batches": [2], "repeats": 1}
    with pytest.raises(WrongLength) as caught:
        measured(lambda task: Short(), task, clips)  # type: ignore[arg-type, return-value]
    assert (caught.value.expected, caught.value.lengths) == (4, [3, 3])


def test_clips_and_questions_are_always_the_same() -> None:
    first, second = clips(2, 0.5)
    assert len(first) == 8000
    assert np.array_equal(first, clips(1, 0.5)[0])
    assert not np.array_equal(first, second)
    assert questions(9) == questions(9) != questions(9, seed=1)
    pcm = np.frombuffer(spoken("What is two plus three?"), "<i2")
    assert 0.6 < len(pcm) / RATE < 3
    assert abs(int(pcm[-1200:].max())) > 300  # no silence behind it


def test_checkpoints_are_generated_once_and_limit_tokens(cache: Path) -> None:
    eight, nine = (
        whisper_checkpoint("whisper-least", 8, cache),
        whisper_checkpoint("whisper-least", 9, cache),
    )
    assert (eight / "model.safetensors").resolve() == (nine / "model.safetensors").resolve()
    lengths = [
        json.loads((folder / "generation_config.json").read_text())["max_length"]
        for folder in (eight, nine)
    ]
    assert lengths == [8, 9]
    made = (eight / "config.json").stat().st_mtime_ns
    assert (
        whisper_checkpoint("whisper-least", 8, cache) / "config.json"
    ).stat().st_mtime_ns == made


def test_audible_is_the_time_of_the_first_loud_sample() -> None:
    quiet, loud = (
        np.full(RATE // 10, AUDIBLE - 1, "<i2").tobytes(),
        np.full(RATE // 10, -AUDIBLE, "<i2").tobytes(),
    )
    ahead, late = Loudspeaker(), Loudspeaker()
    ahead.play(quiet, 5.0)
    assert not ahead.audible
    ahead.play(quiet + loud, 5.01)  # before the first piece was played
    assert ahead.audible == pytest.approx(5.2)
    late.play(quiet, 5.0)
    late.play(loud, 7.0)
    late.play(loud, 7.0)
    assert late.audible == 7.0


def test_turns_are_reported_by_stage_and_silent_ones_fail() -> None:
    stages = dict(
        zip(
            ("speech ends", "transcript", "first text", "first audio", "audible"),
            range(200, 700, 100),
            strict=True,
        )
    )
    answered = [Turn("?", {stage: float(at) for stage, at in stages.items()}) for _ in range(19)]
    found = TurnsFindings(answered)
    assert [target.met for target in turns_targets(found)] == [True, True]
    assert "| audible |  | 600 | 600 | 100 | 100 |" in turns_report(found, TurnsPlan())
    silent = {stage: at for stage, at in answered[0].stages.items() if stage != "audible"}
    found.turns += [Turn("?", silent), Turn("?", silent)]
    assert [target.met for target in turns_targets(found)] == [True, False]
    assert "2 had no audible reply" in turns_report(found, TurnsPlan())


def test_interruptions_are_judged_by_the_end_of_the_reply() -> None:
    turns = [Turn("?", dict.fromkeys(STAGES, 100.0))]
    found = TurnsFindings(
        turns, [Interruption(200.0, 20.0)] * 19 + [Interruption(300.0, 160.0)] * 2, too_late=3
    )
    barge_in = turns_targets(found)[-1]
    assert (barge_in.value, barge_in.met) == (160.0, False)
    report = turns_report(found, TurnsPlan())
    assert "21 replies were interrupted; 3 more came after the end of the reply" in report
    assert "| reply stopped, after detection |  | 20 | 160 |" in report


def test_speech_is_judged_by_stream() -> None:
    found = TtsFindings(
        {"pocket-tts": {1: [Stream(0.1, 1.0, 5.0)], 4: [Stream(0.4, 4.5, 5.0)] * 4}}
    )
    judged = {target.what: target.met for target in tts_targets(found)}
    assert judged == {
        "pocket-tts: real-time factor, 1 streams": True,
        "pocket-tts: real-time factor, 4 streams": False,
        "pocket-tts: first audio p50, alone": True,
    }
    assert quantile([1.0, 2.0], 0.5) == 1.0
    vits = TtsPlan().vits_name
    found = TtsFindings({vits: {1: [Stream(0.1, 1.0, 5.0)]}}, {SHERPA: "it is not installed"})
    assert [target.what for target in tts_targets(found)] == [f"{vits}: real-time factor, 1 stream"]
    assert "* sherpa-onnx is absent: it is not installed" in tts_report(found)
    found = TtsFindings({**found.spoken, SHERPA: {1: [Stream(1.5, 1.5, 5.0)]}})
    (peer, factor) = tts_targets(found)
    assert (peer.what, peer.value, peer.met) == ("motet / sherpa-onnx, 1 stream", 1.5, True)
    assert (factor.value, factor.met) == (0.2, True)
    assert f"{vits} is 1.50 times as fast as sherpa-onnx" in tts_report(found)


def test_vits_is_exported_as_sherpa_onnx_reads_it(cache: Path) -> None:
    folder = vits_checkpoint(cache, "the least size")
    text = "so."
    exported = vits_onnx(folder, text)
    content = (exported / MODEL).read_bytes()
    for name in INPUTS:
        assert name.encode() in content
    for key, value in (("frontend", "characters"), ("comment", "mms-tts"), ("add_blank", "1")):
        assert (
            bytes([len(key)]) + key.encode() + bytes([18, len(value)]) + value.encode() in content
        )
    assert "  1\n" in (exported / TOKENS).read_text()
    assert vits_onnx(folder, "we") == exported  # as many tokens
    model = VitsModel.from_pretrained(folder).eval()
    tokens_of = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    nothing, one = torch.zeros(1), torch.ones(1)
    length = torch.tensor([tokens_of["input_ids"].shape[1]])
    with torch.inference_mode():
        got = Graph(model)(tokens_of["input_ids"], length, nothing, one, nothing)
        wanted = model(**tokens_of).waveform
        slow = Graph(model)(tokens_of["input_ids"], length, nothing, 2 * one, nothing)
    torch.testing.assert_close(got[0], wanted, rtol=0, atol=1e-5)
    assert slow.shape[-1] > 1.5 * got.shape[-1]


def test_missing_speech_models_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("benchmarks.voice.turns.MODELS", tmp_path)
    found = run_turns(TurnsPlan(asr="somewhere"))
    assert (found.turns, found.missing) == ([], "pocket-tts are not in models/: give --tts FOLDER")
    assert turns_targets(found) == []
    assert "pocket-tts" in turns_report(found, TurnsPlan())


@pytest.mark.extended("peers")
def test_recognizers_and_voices_are_measured(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WHISPER_PYTHON, "/usr/bin/false")
    peer = bool(os.environ.get(SHERPA_PYTHON))
    output = tmp_path / "voice.json"
    only = ["--only", "asr", "tts", "--cache", str(cache), "--output", str(output)]
    voice.main(
        [
            "--quick",
            "--threads",
            "1",
            "--engines",
            "motet float32",
            "transformers",
            "faster-whisper int8",
            *only,
        ]
    )
    found = json.loads(output.read_text())["findings"]
    dtype = transformers_dtype("auto")
    peers = ("motet float32", f"transformers pipeline, {dtype}")
    ours, theirs = (found["asr"]["engines"][name]["runs"] for name in peers)
    assert list(ours) == ["1 × 1 s", "2 × 1 s", "1 × 4 s", "2 × 4 s"]
    if dtype == "float32":  # rounded to 16 bits, a random model may prefer other words
        assert {load: tokens(ours[load]) for load in ours} == {
            load: tokens(theirs[load]) for load in theirs
        }
    for runs in ours.values():
        assert all(seconds > 0 for seconds in (runs["features"][0], runs["whole"][0]))
    assert list(found["asr"]["missing"]) == ["faster-whisper int8"]
    assert len(found["tts"]["spoken"]) == (3 if peer else 2)
    assert list(found["tts"]["missing"]) == ([] if peer else [SHERPA])
    for name, streams in found["tts"]["spoken"].items():
        assert [len(rows) for rows in streams.values()] == [1] if name == SHERPA else [1, 2]
        assert all(
            0 < row["first"] <= row["last"] and row["speech"] > 0.5
            for rows in streams.values()
            for row in rows
        )
    assert "Load average" in capsys.readouterr().out
