"""The engines say what transformers says, whatever comes and goes beside a window."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoFeatureExtractor,
    MoonshineForConditionalGeneration,
    ParakeetForCTC,
    WhisperForConditionalGeneration,
)

from motet_asr.checkpoint import load_engine
from motet_asr.config import EngineConfig
from motet_asr.engine.engine import Engine
from motet_asr.engine.request import TranscriptionOptions, WindowResult
from motet_asr.engine.slot_engine import RunningWindow, SlotEngine
from motet_asr.models.whisper import Whisper
from motet_asr.models.whisper_encoder import WhisperEncoder
from motet_asr.transcription.align import token_ends
from motet_shared.errors import BadRequest, ConfigError, InternalError, Overloaded
from support.checkpoints.asr_checkpoints import (
    RATE,
    WINDOW,
    noise,
    tiny_moonshine,
    tiny_parakeet,
    tiny_whisper,
)
from support.running.refusals import refuses

CALM = settings(max_examples=8, suppress_health_check=list(HealthCheck))
SOUNDS = [noise(WINDOW, seed) for seed in range(6)]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def moonshine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moonshine(tmp_path_factory.mktemp("moonshine"))


@pytest.fixture(scope="module")
def parakeet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_parakeet(tmp_path_factory.mktemp("parakeet"))


def engine_of(path: Path, **options: Any) -> Engine:
    settings: dict[str, Any] = {"model": str(path), "fallback": False}
    return load_engine(EngineConfig(**settings | options))


def add(engine: Engine, key: int, sound: Any, options: TranscriptionOptions) -> None:
    engine.add(key, engine.prepare(sound), len(sound) / RATE, options)


def hear(engine: Engine, sound: Any, options: TranscriptionOptions) -> WindowResult:
    """One window alone."""
    add(engine, -1, sound, options)
    while engine.has_work:
        for output in engine.step():
            assert output.result is not None, output.error
            return output.result
    raise AssertionError("the engine fell silent")


class Reference:
    """transformers' own answers, one window at a time; asked once each."""

    def __init__(self, path: Path):
        self.model = WhisperForConditionalGeneration.from_pretrained(path)
        self.extractor = AutoFeatureExtractor.from_pretrained(path)
        self._known: dict[Any, list[int]] = {}

    def features(self, sound: Any) -> torch.Tensor:
        features: torch.Tensor = self.extractor(
            sound, sampling_rate=RATE, return_tensors="pt"
        ).input_features
        return features

    def generate(self, sound: Any, **options: Any) -> Any:
        return self.model.generate(self.features(sound), **options)

    def tokens(self, index: int, options: TranscriptionOptions) -> list[int]:
        if (index, options) not in self._known:
            self._known[index, options] = self._tokens(SOUNDS[index], options)
        return self._known[index, options]

    def _tokens(self, sound: Any, options: TranscriptionOptions) -> list[int]:
        language, task = options.language or None, options.task
        found = self.generate(
            sound, language=language, task=task, return_timestamps=options.timestamps
        )
        return self.said(found)

    def said(self, found: Any) -> list[int]:
        """Without the padding at the end."""
        return [
            token
            for token in found[0].tolist()
            if token != self.model.generation_config.eos_token_id
        ]


@pytest.fixture(scope="module")
def reference(whisper: Path) -> Reference:
    return Reference(whisper)


def kept(family: Any, heard: WindowResult) -> list[int]:
    """Tokens as transformers counts them: behind the last pair of timestamps a pass is not settled."""
    tokens = []
    for one in heard.passes:
        cut = family._segments.cut(one.tokens)
        tokens += one.tokens if cut is None else one.tokens[: cut + 1]
    return tokens


OPTIONS = st.builds(
    TranscriptionOptions,
    language=st.sampled_from(["", "en", "fr"]),
    task=st.sampled_from(["transcribe", "translate"]),
    timestamps=st.booleans(),
    words=st.booleans(),
)


@CALM
@given(
    windows=st.lists(
        st.tuples(st.integers(0, len(SOUNDS) - 1), OPTIONS, st.integers(0, 25)),
        min_size=1,
        max_size=8,
    ),
    cancelled=st.dictionaries(st.integers(0, 7), st.integers(0, 30), max_size=3),
    rows=st.integers(1, 4),
)
def test_whisper_is_exact_under_any_schedule(
    whisper: Path, reference: Reference, windows: list[Any], cancelled: dict[int, int], rows: int
) -> None:
    engine = engine_of(whisper, max_rows=rows, encode_batch=2)
    due = {key: arrival for key, (_, _, arrival) in enumerate(windows)}
    heard: dict[int, WindowResult] = {}
    for tick in range(2000):
        for key, arrival in due.items():
            if arrival == tick:
                add(engine, key, SOUNDS[windows[key][0]], windows[key][1])
            if cancelled.get(key) == tick:
                engine.cancel(key)
                assert not engine.holds(key)
        for output in engine.step():
            assert output.result is not None
            heard[output.key] = output.result  # type: ignore[index]
        engine.check_integrity()
        if tick > 30 and not engine.has_work:
            break
    assert engine.stats()["slots_free"] == rows
    for key, (index, options, arrival) in enumerate(windows):
        if key in heard:
            assert kept(engine.family, heard[key]) == reference.tokens(index, options), options
        else:
            assert cancelled[key] >= arrival


def test_the_answers_differ_and_timestamps_come_in_pairs(reference: Reference) -> None:
    """Else the test above would prove little."""
    said = {
        tuple(reference.tokens(index, TranscriptionOptions(timestamps=False, language="en")))
        for index in range(len(SOUNDS))
    }
    assert len(said) > 3
    timed = reference.tokens(0, TranscriptionOptions(language="en"))
    first = reference.model.generation_config.no_timestamps_token_id + 1
    assert sum(token >= first for token in timed) >= 2


def test_the_language_that_is_detected_is_the_reference_s(
    whisper: Path, reference: Reference
) -> None:
    engine = engine_of(whisper)
    ids = reference.model.generation_config.lang_to_id
    for sound in SOUNDS:
        found = reference.model.detect_language(reference.features(sound)).item()
        assert ids[f"<|{hear(engine, sound, TranscriptionOptions()).language}|>"] == found


def test_a_prompt_is_what_was_said_before(whisper: Path, reference: Reference) -> None:
    engine = engine_of(whisper)
    tokenizer = engine.family._tokenizer  # type: ignore[attr-defined]
    for text in ("red circle", "a " * 60):
        ids = tokenizer(" " + text.strip(), add_special_tokens=False).input_ids[-(48 // 2 - 1) :]
        prompt = torch.tensor([reference.model.generation_config.prev_sot_token_id, *ids])
        options = TranscriptionOptions(language="en", timestamps=False, prompt=text)
        wanted = reference.generate(SOUNDS[1], language="en", task="transcribe", prompt_ids=prompt)
        said = kept(engine.family, hear(engine, SOUNDS[1], options))
        assert said == reference.said(wanted)
        assert said != reference.tokens(1, TranscriptionOptions(language="en", timestamps=False))
    with refuses(BadRequest, "prompt"):
        add(engine, 0, SOUNDS[0], TranscriptionOptions(prompt="so <|endoftext|> what"))


def test_words_are_when_the_reference_says(whisper: Path, reference: Reference) -> None:
    engine = engine_of(whisper)
    asked = {"language": "en", "task": "transcribe", "return_token_timestamps": True}
    for sound in SOUNDS[:3]:
        heard = hear(
            engine, sound, TranscriptionOptions(language="en", timestamps=False, words=True)
        )
        attention = heard.passes[0].attention_NTF
        assert attention is not None
        found = reference.generate(sound, force_unique_generate_call=True, **asked)
        ends = token_ends(attention, 0.02, 7)
        assert ends == pytest.approx(found["token_timestamps"][0][-len(ends) :].tolist(), abs=1e-4)
        segments = engine.family.segments(heard, WINDOW, True)
        words = [word for segment in segments for word in segment.words]
        assert (
            "".join(word.text for word in words)
            == "".join(segment.text for segment in segments)
            != ""
        )
        assert all(0 <= word.start <= word.end <= WINDOW for word in words)


@pytest.mark.parametrize(
    ("compression", "logprob"), [(0.5, -99.0), (1.35, -0.01), (1.3, -1.0), (9.0, -99.0)]
)
def test_a_window_is_heard_again_where_the_reference_would(
    whisper: Path, reference: Reference, compression: float, logprob: float
) -> None:
    """The reference's only other temperature is the same one: it says by the number of its tries if it wanted it."""
    engine = engine_of(
        whisper, fallback=True, compression_threshold=compression, logprob_threshold=logprob
    )
    thresholds = {"compression_ratio_threshold": compression, "logprob_threshold": logprob}
    fell = []
    for sound in SOUNDS[:4]:
        heard = hear(engine, sound, TranscriptionOptions(language="en", timestamps=False))
        with _tries(reference.model) as tries:
            reference.generate(
                sound,
                language="en",
                task="transcribe",
                temperature=(0.0, 0.0),
                force_unique_generate_call=True,
                **thresholds,
            )
        fell.append(heard.passes[0].temperature > 0)
        assert fell[-1] == (len(tries) > 1)
    if compression == 0.5 or logprob == -0.01:
        assert all(fell)
    if compression == 9.0:
        assert not any(fell)


@contextmanager
def _tries(model: Any) -> Iterator[list[bool]]:
    """What the reference finds of each of its tries: whether another is needed."""
    tries: list[bool] = []
    judge = model._need_fallback

    def noted(*args: Any) -> Any:
        found = judge(*args)
        tries.append(found[0])
        return found

    model._need_fallback = noted
    try:
        yield tries
    finally:
        del model._need_fallback


def test_a_window_that_is_certainly_silent_is_skipped(whisper: Path) -> None:
    engine = engine_of(whisper, fallback=True, logprob_threshold=0.0, no_speech_threshold=0.0)
    heard = hear(engine, SOUNDS[0], TranscriptionOptions(language="en"))
    assert [one.skipped for one in heard.passes] == [True]
    assert engine.family.segments(heard, WINDOW, False) == []
    assert engine.counts.fallbacks == 0


def test_a_temperature_draws_the_same_in_any_company(whisper: Path) -> None:
    hot = TranscriptionOptions(language="en", temperature=0.9, seed=5, timestamps=False)
    alone = hear(engine_of(whisper), SOUNDS[0], hot).tokens
    crowd = engine_of(whisper)
    for key in range(4):
        add(
            crowd,
            key,
            SOUNDS[key],
            hot if key == 0 else TranscriptionOptions(language="fr", temperature=0.7, seed=key),
        )
    found = {output.key: output.result for _ in range(400) for output in crowd.step()}
    assert found[0] is not None
    assert found[0].tokens == alone
    assert (
        hear(
            engine_of(whisper),
            SOUNDS[0],
            TranscriptionOptions(language="en", temperature=0.9, seed=6),
        ).tokens
        != alone
    )


def test_english_only_models_neither_detect_nor_translate(tmp_path: Path) -> None:
    engine = engine_of(tiny_whisper(tmp_path, languages=()))
    reference = Reference(tmp_path)
    for sound in SOUNDS[:3]:
        heard = hear(engine, sound, TranscriptionOptions(timestamps=False))
        assert kept(engine.family, heard) == reference.said(reference.generate(sound))
        assert heard.language == ""
    with refuses(BadRequest, "task"):
        add(engine, 0, SOUNDS[0], TranscriptionOptions(task="translate"))


def test_weights_that_compute_no_numbers_end_the_window_and_nothing_else(whisper: Path) -> None:
    engine = engine_of(whisper)
    add(engine, 0, SOUNDS[0], TranscriptionOptions(language="en", timestamps=False))
    engine.step()
    good = hear(engine, SOUNDS[1], TranscriptionOptions(language="en", timestamps=False)).tokens
    spoiled = SOUNDS[2].copy()
    spoiled[100] = float("nan")
    add(engine, 1, spoiled, TranscriptionOptions(language="en", timestamps=False))
    add(engine, 2, SOUNDS[1], TranscriptionOptions(language="en", timestamps=False))
    ended = {output.key: output for _ in range(300) for output in engine.step()}
    assert isinstance(ended[1].error, InternalError)
    assert ended[2].result is not None
    assert ended[2].result.tokens == good
    engine.check_integrity()
    assert engine.stats()["slots_free"] == 16


def test_a_window_that_the_encoder_fails_ends_alone(
    whisper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TranscriptionOptions(language="en", timestamps=False)
    engine = engine_of(whisper, encode_batch=4)
    assert isinstance(engine, SlotEngine)
    due = [hear(engine, SOUNDS[key], options).tokens for key in range(4)]
    encode = engine.family.encode

    def failing(runs: Sequence[RunningWindow]) -> list[torch.Tensor]:
        if any(run.waiting.key == 1 for run in runs):
            raise RuntimeError("a bug of model code")
        return encode(runs)

    monkeypatch.setattr(engine.family, "encode", failing)
    for key in range(4):
        add(engine, key, SOUNDS[key], options)
    ended = {output.key: output for _ in range(300) for output in engine.step()}
    engine.check_integrity()
    error = ended.pop(1).error
    assert isinstance(error, InternalError)
    assert isinstance(error.__cause__, RuntimeError), "its traceback is logged"
    del due[1]
    assert [one.result and one.result.tokens for _, one in sorted(ended.items())] == due


@pytest.mark.parametrize(("form", "near"), [("float32", 1e-5), ("bfloat16", 0.03), ("int8", 0.1)])
def test_packed_matrices_compute_the_same_up_to_their_rounding(
    whisper: Path, reference: Reference, form: str, near: float
) -> None:
    engine, options = (
        engine_of(whisper, weights=form),
        TranscriptionOptions(language="en", timestamps=False),
    )
    if form == "float32":
        assert kept(engine.family, hear(engine, SOUNDS[0], options)) == reference.tokens(0, options)
    logits = [_first_logits(engine_of(whisper, weights=weights)) for weights in (form, "torch")]
    assert (logits[0] - logits[1]).norm() < near * logits[1].norm()


def _first_logits(engine: Engine) -> torch.Tensor:
    """Behind a prompt and four tokens that were read one by one."""
    add(engine, 0, SOUNDS[0], TranscriptionOptions(language="en", timestamps=False))
    assert isinstance(engine, SlotEngine)
    engine.step()
    decoder = engine.family.decoder
    with torch.inference_mode():
        for token in (5, 60, 7, 80):
            states, _ = decoder.step(engine.slots, [token])
        logits: torch.Tensor = decoder.logits(states)
    return logits


def test_features_of_a_short_sound_are_those_of_the_whole_window(
    whisper: Path, reference: Reference
) -> None:
    engine = engine_of(whisper)
    for seconds in (0.01, 0.3, 1.0, WINDOW - 0.05, WINDOW - 0.01, WINDOW):
        sound = SOUNDS[4][: round(seconds * RATE)]
        torch.testing.assert_close(
            engine.prepare(sound), reference.features(sound)[0], rtol=0, atol=1e-6
        )


@pytest.mark.parametrize(("form", "near"), [("float32", 1e-5), ("bfloat16", 0.03), ("int8", 0.1)])
@pytest.mark.parametrize("frames", [2 * WINDOW * 50, 70])
def test_the_encoder_computes_what_transformers_modules_do(
    reference: Reference, form: str, near: float, frames: int
) -> None:
    features_MF = reference.features(SOUNDS[3])[0, :, :frames]
    with torch.inference_mode():
        [states_SE] = WhisperEncoder(reference.model, form)([features_MF])
        wanted_SE = encoded(reference.model.model.encoder, features_MF)
    assert states_SE.shape == wanted_SE.shape == (frames // 2, 32)
    assert (states_SE - wanted_SE).norm() < near * wanted_SE.norm()


def encoded(encoder: Any, features_MF: torch.Tensor) -> torch.Tensor:
    """What transformers' modules make of a window of any length, which its own `forward` refuses."""
    x = torch.nn.functional.gelu(encoder.conv1(features_MF[None]))
    x = torch.nn.functional.gelu(encoder.conv2(x)).transpose(1, 2)
    x = x + encoder.embed_positions.weight[: x.shape[1]]
    for layer in encoder.layers:
        x = layer(x, None)
    states: torch.Tensor = encoder.layer_norm(x)[0]
    return states


def test_with_a_padding_the_encoder_reads_no_more_silence_than_that(
    whisper: Path, reference: Reference, tmp_path: Path
) -> None:
    engine, options = (
        engine_of(whisper, padding=0.1),
        TranscriptionOptions(language="en", words=True),
    )
    lengths = [0.5, 1.23, WINDOW]
    for key, seconds in enumerate(lengths):
        add(engine, key, SOUNDS[key][: round(seconds * RATE)], options)
    assert isinstance(engine, SlotEngine)
    engine.step()
    assert engine.slots.frames == [30, 67, WINDOW * 50]  # of 20 ms, with 0.1 s behind the sound
    shortest = reference.features(SOUNDS[0][: RATE // 2])[0, :, :60]
    with torch.inference_mode():
        states_SE = encoded(reference.model.model.encoder, shortest)
        key_SE = reference.model.model.decoder.layers[0].encoder_attn.k_proj(states_SE)
    kept_HSD = engine.slots.cross_kv[0, 0, 0, :, :30]
    torch.testing.assert_close(kept_HSD.transpose(0, 1).flatten(1), key_SE, rtol=1e-4, atol=1e-4)
    together = {output.key: output.result for _ in range(300) for output in engine.step()}
    for key, seconds in enumerate(lengths):
        alone, company = hear(engine, SOUNDS[key][: round(seconds * RATE)], options), together[key]
        assert company is not None
        assert company.tokens == alone.tokens
        for one, other in zip(company.passes, alone.passes, strict=True):
            assert one.attention_NTF is not None
            torch.testing.assert_close(one.attention_NTF, other.attention_NTF)
    engine.check_integrity()


def test_a_checkpoint_may_say_how_much_silence_it_needs(whisper: Path, tmp_path: Path) -> None:
    folder = tmp_path / "short"
    shutil.copytree(whisper, folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"motet_padding": 0.2}))
    for chosen, frames in ({}, 35), ({"padding": 0.0}, 25), ({"weights": "torch"}, WINDOW * 50):
        engine = engine_of(folder, **chosen)
        assert isinstance(engine, SlotEngine)
        add(engine, 0, SOUNDS[0][: RATE // 2], TranscriptionOptions(language="en"))
        engine.step()
        assert engine.slots.frames == [frames]
    with refuses(ConfigError, "padding"):
        engine_of(folder, padding=0.5, weights="torch")
    with refuses(ConfigError, "padding"):
        engine_of(folder, padding=-2)


def test_what_cannot_be_done_is_refused(whisper: Path, tmp_path: Path) -> None:
    engine = engine_of(whisper, max_waiting=1)
    with refuses(BadRequest, "language"):
        add(engine, 0, SOUNDS[0], TranscriptionOptions(language="tlh"))
    with refuses(BadRequest, "audio"):
        engine.prepare(noise(2.5))
    assert engine_of(whisper, window=1.5).family.window == 1.5
    assert engine_of(whisper, window=9.0).family.window == WINDOW
    add(engine, 0, SOUNDS[0], TranscriptionOptions(language="en"))
    with refuses(BadRequest, "key"):
        add(engine, 0, SOUNDS[0], TranscriptionOptions())
    with pytest.raises(Overloaded, match="max_waiting"):
        add(engine, 1, SOUNDS[0], TranscriptionOptions())
    assert isinstance(engine.family, Whisper)
    assert engine.family.code("German") == "de"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with refuses(ConfigError, "model"):
        engine_of(tmp_path)
    with refuses(ConfigError, "model"):
        engine_of(tmp_path / "none")


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "gpu"},
        {"device": f"cuda:{torch.cuda.device_count()}"},
        {"dtype": "float16"},
        {"weights": "float16"},
        {"dtype": "int8"},
    ],
)
def test_devices_and_types_that_are_not_there_are_refused(
    whisper: Path, settings: dict[str, str]
) -> None:
    [field] = settings
    with refuses(ConfigError, field):
        engine_of(whisper, **settings)


def test_an_engine_says_what_it_computes_with(whisper: Path, moonshine: Path) -> None:
    said = engine_of(whisper, weights="int8").family.describe()
    assert (said["device"], said["dtype"], said["weights"]) == ("cpu", "float32", "int8")
    assert said["kernels"]
    assert engine_of(moonshine, dtype="bfloat16").family.describe()["dtype"] == "bfloat16"


# ---------------------------------------------------------------------------------------------------- other families
@CALM
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    arrivals=st.lists(st.integers(0, 12), min_size=6, max_size=6),
    cancelled=st.sets(st.integers(0, 5), max_size=2),
)
def test_moonshine_is_exact_under_any_schedule(
    moonshine: Path, lengths: list[int], arrivals: list[int], cancelled: set[int]
) -> None:
    model = MoonshineForConditionalGeneration.from_pretrained(moonshine)
    engine = engine_of(moonshine, max_rows=3, encode_batch=3)
    heard = _run(engine, [noise(length / 10, length) for length in lengths], arrivals, cancelled)
    for index, length in enumerate(lengths):
        if index in cancelled:
            continue
        sound = torch.tensor(noise(length / 10, length))[None]
        limit = max(int(length / 10 * 6.5), 2)
        wanted = model.generate(input_values=sound, max_length=limit)[0].tolist()[1:]
        assert heard[index].tokens == [token for token in wanted if token != 2]


@CALM
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    arrivals=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    cancelled=st.sets(st.integers(0, 5), max_size=2),
)
def test_parakeet_is_exact_under_any_schedule(
    parakeet: Path, lengths: list[int], arrivals: list[int], cancelled: set[int]
) -> None:
    model = ParakeetForCTC.from_pretrained(parakeet).eval()
    extractor = AutoFeatureExtractor.from_pretrained(parakeet)
    engine = engine_of(parakeet, max_rows=3, encode_batch=3)
    heard = _run(engine, [noise(length / 10, length) for length in lengths], arrivals, cancelled)
    for index, length in enumerate(lengths):
        if index in cancelled and index not in heard:
            continue
        inputs = extractor(noise(length / 10, length), sampling_rate=RATE, return_tensors="pt")
        wanted = model.generate(**inputs)[0].tolist()
        assert heard[index].tokens == wanted[: len(heard[index].tokens)]
        assert set(wanted[len(heard[index].tokens) :]) <= {63}


def _run(
    engine: Engine, sounds: list[Any], arrivals: list[int], cancelled: set[int]
) -> dict[Any, WindowResult]:
    """Windows that arrive at their ticks; those of `cancelled` leave one tick later, if they are still there."""
    heard: dict[Any, WindowResult | None] = {}
    for tick in range(500):
        for key, sound in enumerate(sounds):
            if arrivals[key] == tick:
                add(engine, key, sound, TranscriptionOptions())
            if key in cancelled and arrivals[key] + 1 == tick:
                engine.cancel(key)
                assert not engine.holds(key)
        heard |= {output.key: output.result for output in engine.step()}
        engine.check_integrity()
        if tick > 13 and not engine.has_work:
            return {key: found for key, found in heard.items() if found is not None}
    raise AssertionError("the engine does not come to an end")


def test_parakeet_s_words_are_where_its_frames_are(parakeet: Path) -> None:
    engine = engine_of(parakeet)
    sound = noise(3.0, 1)
    heard = hear(engine, sound, TranscriptionOptions())
    segments = engine.family.segments(heard, 3.0, True)
    words = [word for segment in segments for word in segment.words]
    assert words
    for word in words:
        assert word.start == pytest.approx(round(word.start / 0.08) * 0.08)
        assert 0 <= word.start < word.end <= 3.0
    assert all(one.end <= other.start + 1e-9 for one, other in pairwise(words))
    for segment in segments:
        assert "".join(word.text for word in segment.words).split() == segment.text.split()
