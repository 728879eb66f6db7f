"""Models whose tokens belong to frames, CTC and transducers, say what transformers says."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoFeatureExtractor

from motet_asr.engine.engine import Engine
from motet_asr.engine.request import TranscriptionOptions, WindowResult
from motet_asr.engine.transducer_engine import TransducerEngine
from motet_asr.models.ctc import CtcEngine
from motet_asr.models.nemotron import DELAY, Nemotron
from motet_asr.models.registry import RECOGNIZERS
from motet_shared.errors import BadRequest, ConfigError, InternalError, UnsupportedParameter
from support.checkpoints.asr_checkpoints import RATE, noise
from support.checkpoints.recognizers import Checkpoints, tiny_waveform_ctc
from support.engine.recognizer_runs import add, engine_of, run
from support.running.refusals import refuses

BLANK = 63
CTC = [kind for kind, one in RECOGNIZERS.items() if one.engine is CtcEngine]
TRANSDUCERS = [kind for kind, one in RECOGNIZERS.items() if one.engine is TransducerEngine]
STREAMING = [kind for kind in TRANSDUCERS if "nemotron" in kind]
SECONDS = (0.3, 1.04, 1.7, 0.3, 2.3)
# What transformers says of its own code: WavLM's masks, and the length of any answer.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Support for mismatched key_padding_mask:UserWarning",
    "ignore:Using the model-agnostic default `max_length`:UserWarning",
)


def reference_of(path: Path, kind: str) -> tuple[Any, Any]:
    model = getattr(transformers, RECOGNIZERS[kind].class_name).from_pretrained(path)
    return model.eval(), AutoFeatureExtractor.from_pretrained(path)


def ctc_tokens(model: Any, extractor: Any, sound: Any) -> list[int]:
    inputs = extractor(sound, sampling_rate=RATE, return_tensors="pt")
    with torch.inference_mode():
        tokens: list[int] = model(**inputs).logits[0].argmax(-1).tolist()
    return tokens


def emitted(model: Any, **inputs: Any) -> list[tuple[int, int]]:
    """Return transformers' tokens, each with its frame."""
    found = model.generate(**inputs)
    said, frame = [], 0
    steps = zip(found.sequences[0].tolist()[1:], found.durations[0].tolist()[1:], strict=True)
    for token, duration in steps:
        if token != BLANK:
            said.append((token, frame))
        frame += duration
    return said


def spans_of(result: WindowResult) -> list[tuple[int, int]]:
    [one] = result.passes
    return [(token, start) for token, (start, _) in zip(one.tokens, one.spans, strict=True)]


@pytest.mark.long(after=3)
@pytest.mark.parametrize("kind", CTC)
def test_ctc_is_exact_in_any_company(folders: Checkpoints, kind: str) -> None:
    engine = engine_of(folders[kind], max_rows=3, encode_batch=3)
    sounds = [noise(seconds, index) for index, seconds in enumerate(SECONDS)]
    for key, sound in enumerate(sounds):
        add(engine, key, sound)
    heard = run(engine)
    model, extractor = reference_of(folders[kind], kind)
    different = set()
    for key, sound in enumerate(sounds):
        wanted, tokens = ctc_tokens(model, extractor, sound), heard[key].tokens
        assert len(tokens) >= len(wanted) - 1
        assert tokens == wanted[: len(tokens)]
        different |= set(tokens)
        seconds = len(tokens) * engine.family.frame  # type: ignore[attr-defined]
        assert abs(seconds - SECONDS[key]) < 0.3
    assert len(different) > 3
    _check_words(engine, heard[4], SECONDS[4])


def _check_words(engine: Engine, result: WindowResult, seconds: float) -> None:
    engine.family.check_words()
    segments = engine.family.segments(result, seconds, True)
    words = [word for segment in segments for word in segment.words]
    assert words
    assert all(0 <= word.start <= word.end <= seconds for word in words)
    assert all(one.start <= other.start for one, other in pairwise(words))
    for segment in segments:
        assert "".join(word.text for word in segment.words).split() == segment.text.split()
        assert len(segment.tokens) == len(segment.logprobs)


def test_a_window_that_is_normalized_as_a_whole_is_not_padded(tmp_path: Path) -> None:
    """wav2vec2's first checkpoints have a group norm over all samples, and no attention mask."""
    folder = tiny_waveform_ctc(tmp_path, "Wav2Vec2ForCTC", norm="group")
    engine = engine_of(folder, encode_batch=8)
    sounds = [noise(seconds, index) for index, seconds in enumerate(SECONDS)]
    for key, sound in enumerate(sounds):
        add(engine, key, sound)
    heard = run(engine)
    model, extractor = reference_of(folder, "wav2vec2")
    for key, sound in enumerate(sounds):
        assert heard[key].tokens == ctc_tokens(model, extractor, sound)


@pytest.mark.long(after=2)
@pytest.mark.parametrize("kind", TRANSDUCERS)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    arrivals=st.lists(st.integers(0, 6), min_size=5, max_size=5),
    cancelled=st.sets(st.integers(0, 4), max_size=2),
)
def test_transducers_are_exact_under_any_schedule(
    folders: Checkpoints,
    kind: str,
    lengths: list[int],
    arrivals: list[int],
    cancelled: set[int],
) -> None:
    model, extractor = reference_of(folders[kind], kind)
    engine = engine_of(folders[kind], max_rows=3, encode_batch=2)
    sounds = [noise(length / 10, length) for length in lengths]
    heard: dict[Any, WindowResult] = {}
    for tick in range(400):
        for key, sound in enumerate(sounds):
            if arrivals[key] == tick:
                add(engine, key, sound)
            if key in cancelled and arrivals[key] + 1 == tick:
                engine.cancel(key)
                assert not engine.holds(key)
        for output in engine.step():
            assert output.result is not None
            heard[output.key] = output.result
        engine.check_integrity()
        if tick > 7 and not engine.has_work:
            break
    assert not engine.has_work
    for key, sound in enumerate(sounds):
        if key in heard:
            inputs = extractor(sound, sampling_rate=RATE, return_tensors="pt")
            assert spans_of(heard[key]) == emitted(model, **inputs)
        else:
            assert key in cancelled


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", TRANSDUCERS)
def test_tokens_spread_over_the_frames_and_make_words(folders: Checkpoints, kind: str) -> None:
    """Else the test above would prove little."""
    engine = engine_of(folders[kind])
    add(engine, 0, noise(3.0, 3))
    result = run(engine)[0]
    assert len({frame for _, frame in spans_of(result)}) > 3
    assert len(set(result.tokens)) > 2
    assert result.passes[0].frames > len({frame for _, frame in spans_of(result)})
    _check_words(engine, result, 3.0)


def test_what_computes_no_numbers_ends_its_window_and_nothing_else(
    folders: Checkpoints,
) -> None:
    engine = engine_of(folders["parakeet_tdt"])
    add(engine, 0, noise(1.0, 1))
    good = run(engine)[0].tokens
    spoiled = noise(1.0, 2)
    spoiled[100] = float("nan")
    add(engine, 1, spoiled)
    add(engine, 2, noise(1.0, 1))
    ended = {output.key: output for _ in range(100) for output in engine.step()}
    assert isinstance(ended[1].error, InternalError)
    assert ended[2].result is not None
    assert ended[2].result.tokens == good
    engine.check_integrity()


# ------------------------------------------------------------------------------------------------ streams
def stream_of(engine: Engine, sound: Any, step: int, **options: Any) -> Any:
    """Feed a live stream in pieces of `step` samples, and return it at its end."""
    stream, key = engine.family.open_stream(), 0
    chosen = TranscriptionOptions(**options)
    for start in range(0, len(sound) + step, step):
        piece = sound[start : start + step]
        chunks = stream.feed(piece) if len(piece) else stream.finish()
        for chunk in chunks:
            key += 1
            engine.add(key, chunk, chunk.seconds, chosen)
            stream.hear(run(engine)[key])
    return stream


def streamed(model: Any, extractor: Any, sound: Any, lookahead: int, **options: Any) -> Any:
    """Return what transformers hears in a stream: features of the whole sound, chunk by chunk."""
    first, rest = 1 + 8 * lookahead, 8 * (lookahead + 1)
    frames = len(sound) // 160
    frames = first + max(-(-(frames - first) // rest), 0) * rest
    padded = np.pad(sound, (0, frames * 160 - len(sound)))
    mel = extractor(padded, sampling_rate=RATE, return_tensors="pt").input_features[:, :frames]
    chunks = (mel[:, at : at + rest] for at in range(first, frames, rest))

    def generator() -> Any:
        yield mel[:, :first]
        yield from chunks

    return emitted(model, input_features=generator(), num_lookahead_tokens=lookahead, **options)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", STREAMING)
def test_a_stream_says_what_transformers_says_of_its_chunks(
    folders: Checkpoints, kind: str
) -> None:
    engine = engine_of(folders[kind])
    family = engine.family
    assert isinstance(family, Nemotron)
    assert family.delay_of(family.lookahead) <= DELAY
    assert family.lookahead == 1
    model, extractor = reference_of(folders[kind], kind)
    sound = noise(3.3, 4)
    wanted = streamed(model, extractor, sound, family.lookahead)
    assert len({frame for _, frame in wanted}) > 3
    for step in (160, 1000, 1 << 20):
        stream = stream_of(engine, sound, step)
        text = "".join(word.text for word in stream.words)
        assert text.split() == family.text_of([token for token, _ in wanted]).split()
        starts = [word.start for word in stream.words]
        assert {round(start / 0.08) for start in starts} <= {frame for _, frame in wanted}
        assert starts == sorted(starts)


def test_words_come_at_most_300_ms_behind_the_voice(folders: Checkpoints) -> None:
    """Every frame is encoded as soon as its chunk is complete, whatever the size of the pieces."""
    engine = engine_of(folders["nemotron_asr_streaming"])
    stream, sound, covered = engine.family.open_stream(), noise(2.0, 4), 0.0
    for start in range(0, len(sound), 160):
        covered += sum(chunk.seconds for chunk in stream.feed(sound[start : start + 160]))
        assert (start + 160) / RATE - covered <= DELAY
    assert covered > 1.7


def test_streams_of_many_callers_are_decoded_together(folders: Checkpoints) -> None:
    engine = engine_of(folders["nemotron_asr_streaming"])
    sounds = [noise(2.0, seed) for seed in range(3)]
    alone = [stream_of(engine, sound, 1 << 20).words for sound in sounds]
    streams = [engine.family.open_stream() for _ in sounds]
    pending = [
        [*stream.feed(sound), *stream.finish()]
        for stream, sound in zip(streams, sounds, strict=True)
    ]
    most = 0
    while any(pending):
        for key, chunks in enumerate(pending):
            if chunks and not engine.holds(key):
                chunk = chunks.pop(0)
                engine.add(key, chunk, chunk.seconds, TranscriptionOptions())
        while engine.has_work:
            for output in engine.step():
                assert output.result is not None
                streams[output.key].hear(output.result)  # type: ignore[call-overload]
            most = max(most, engine.counts.batch_size)
    assert [stream.words for stream in streams] == alone
    assert most == 3


def test_a_prompted_model_is_told_the_language_or_names_it(folders: Checkpoints) -> None:
    folder = folders["nemotron3_5_asr"]
    engine = engine_of(folder)
    assert engine.family.languages == {"en-us", "en", "de-de", "de"}
    model, extractor = reference_of(folder, "nemotron3_5_asr")
    sound = noise(2.5, 6)
    inputs = extractor(sound, sampling_rate=RATE, return_tensors="pt")
    for key, (language, prompt) in enumerate([("de", 1), ("en-us", 0), ("", 2)]):
        add(engine, key, sound, language=language)
        wanted = emitted(model, **inputs, prompt_ids=torch.tensor([prompt]))
        result = run(engine)[key]
        assert spans_of(result) == wanted
        assert result.language == (language or engine.family.language_of(result.tokens))  # type: ignore[attr-defined]
    tags = engine.family._tokenizer.convert_tokens_to_ids(["<de-DE>", "<en-US>"])  # type: ignore[attr-defined]
    assert engine.family.language_of(tags) == "en-us"  # type: ignore[attr-defined]
    assert engine.family.text_of(tags) == ""
    with refuses(BadRequest, "language"):
        add(engine, 9, sound, language="fr")


def test_what_a_model_cannot_do_is_refused_by_name(folders: Checkpoints) -> None:
    engine = engine_of(folders["parakeet_tdt"])
    with refuses(BadRequest, "task"):
        add(engine, 0, noise(1.0), task="translate")
    with refuses(UnsupportedParameter, "prompt"):
        add(engine, 0, noise(1.0), prompt="so")
    with pytest.raises(InternalError):
        engine.family.open_stream()
    with refuses(UnsupportedParameter, "timestamp_granularities"):
        engine_of(folders["moonshine"]).family.check_words()


def test_a_checkpoint_without_a_head_for_text_is_refused_at_load(tmp_path: Path) -> None:
    tiny_waveform_ctc(tmp_path, "Wav2Vec2ForCTC")
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("Wav2Vec2ForCTC", "Wav2Vec2ForPreTraining"))
    with refuses(ConfigError, "model"):
        engine_of(tmp_path)
    path.write_text('{"model_type": "wav2vec3"}')
    with refuses(ConfigError, "model"):
        engine_of(tmp_path)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", RECOGNIZERS)
def test_a_loaded_model_does_what_its_family_says(folders: Checkpoints, kind: str) -> None:
    """docs/recognizers.md is written from what the families say."""
    engine, said = engine_of(folders[kind]), RECOGNIZERS[kind].family
    family = engine.family
    assert isinstance(engine, RECOGNIZERS[kind].engine)
    for name in ("word_times", "translates", "detects", "needs_language", "streams"):
        assert getattr(family, name) == getattr(said, name)
    if family.detects or family.needs_language or family.translates:
        assert family.languages
    add(engine, 0, noise(0.5, 1), language=min(family.languages, default=""))
    assert list(run(engine)) == [0]
