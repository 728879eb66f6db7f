"""Decoder-only recognizers write what transformers' processors and `generate` write, in any company.

Voxtral's prompts are those of mistral-common, which transformers' processors call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoFeatureExtractor, AutoTokenizer, Qwen3ASRProcessor, VoxtralProcessor

from motet_asr.engine.engine import Engine
from motet_asr.engine.request import TranscriptionOptions, WindowResult
from motet_asr.models.delayed_streams import DelayedStreams, VoxtralRealtime
from motet_asr.models.nemotron import DELAY
from motet_asr.models.registry import RECOGNIZERS
from motet_media.audio import Resampler
from motet_shared.errors import BadRequest, ConfigError, InternalError, UnsupportedParameter
from support.checkpoints.asr_checkpoints import RATE, noise
from support.checkpoints.recognizers import Checkpoints
from support.engine.recognizer_runs import add, engine_of, run
from support.running.refusals import refuses

SPOKEN = ("qwen3_asr", "voxtral")
# What mistral-common 1.13.1 writes of a language with the tiny vocabulary.
LANGUAGE_IDS = {
    "": [],
    "de": [302, 140, 141],
    "en": [302, 141, 150],
    "fr": [302, 142, 154],
    "pt": [302, 152, 156],
}
DELAYED = ("kyutai_speech_to_text", "voxtral_realtime")
# What transformers says of its own code: the length of any answer.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Using the model-agnostic default `max_length`:UserWarning"
)


class Reference:
    """transformers' own processor and model.

    Voxtral's processors need mistral-common, whose prompts are written down here instead.
    """

    def __init__(self, folders: Checkpoints, kind: str):
        path = folders[kind]
        model_class = getattr(transformers, RECOGNIZERS[kind].class_name)
        self.kind, self.model = kind, model_class.from_pretrained(path).eval()
        self.extractor = AutoFeatureExtractor.from_pretrained(path)
        if kind == "qwen3_asr":
            self.tokenizer = AutoTokenizer.from_pretrained(path)
            template = self.tokenizer.chat_template
            self.processor = Qwen3ASRProcessor(
                self.extractor, self.tokenizer, chat_template=template
            )

    def inputs(self, sound: Any, language: str = "", prompt: str = "") -> dict[str, Any]:
        """Return what the model is given for a sound at 16 kHz."""
        if self.kind == "qwen3_asr":
            given = {"language": language or None, "prompt": prompt or None}
            return dict(self.processor.apply_transcription_request(sound, **given))
        if self.kind == "voxtral":
            return self._voxtral_inputs(sound, language)
        if self.kind == "kyutai_speech_to_text":
            return dict(self.extractor(resampled(sound), sampling_rate=24_000, return_tensors="pt"))
        after = -len(sound) % 1280 + 17 * 1280  # the delay, and 11 frames for the last word
        padded = np.pad(sound, (32 * 1280, after))
        inputs = dict(self.extractor(padded, sampling_rate=RATE, return_tensors="pt"))
        ids = torch.tensor([[1] + [32] * 38])
        return {"input_ids": ids, "num_delay_tokens": 6, **inputs}

    def _voxtral_inputs(self, sound: Any, language: str) -> dict[str, Any]:
        options = VoxtralProcessor.audio_kwargs
        features = VoxtralProcessor._retrieve_input_features(self, [sound], **options)
        ids = [1, 3, 25, *[24] * (75 * len(features)), 4, *LANGUAGE_IDS[language], 34]
        return {"input_ids": torch.tensor([ids]), "input_features": features}

    @property
    def feature_extractor(self) -> Any:
        return self.extractor

    def tokens(self, sound: Any, **given: str) -> list[int]:
        inputs = self.inputs(sound, **given)
        inputs.pop("num_audio_tokens", None)
        longest = {"max_new_tokens": 512} if self.kind in SPOKEN else {}
        found: list[int] = self.model.generate(**inputs, **longest)[0].tolist()
        prompt = inputs["input_ids"].shape[1] if "input_ids" in inputs else 1
        return self.without_end(found[prompt:])

    def without_end(self, tokens: list[int]) -> list[int]:
        eos = self.model.generation_config.eos_token_id
        ends = {eos} if isinstance(eos, int) else set(eos or ())
        return [token for token in tokens if token not in ends]


@pytest.fixture(scope="module")
def references(folders: Checkpoints) -> Callable[[str], Reference]:
    """transformers' models by `model_type`, loaded when they are first used."""
    return functools.cache(functools.partial(Reference, folders))


def resampled(sound: Any) -> Any:
    """Return a sound at 24 kHz, of 16 bits as live audio is."""
    resampler = Resampler(RATE, 24_000)
    pcm = np.clip(np.rint(sound * 32768), -32768, 32767).astype("<i2").tobytes()
    found = np.frombuffer(resampler.feed(pcm) + resampler.flush(), "<i2")
    return found.astype(np.float32) / 32768


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", [*SPOKEN, *DELAYED])
@settings(
    max_examples=3, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    arrivals=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    cancelled=st.sets(st.integers(0, 3), max_size=1),
)
def test_windows_are_exact_under_any_schedule(
    folders: Checkpoints,
    references: Callable[[str], Reference],
    kind: str,
    lengths: list[int],
    arrivals: list[int],
    cancelled: set[int],
) -> None:
    reference = references(kind)
    engine = engine_of(folders[kind], max_rows=3, encode_batch=2)
    sounds = [noise(length / 10, length) for length in lengths]
    heard: dict[Any, WindowResult] = {}
    for tick in range(1000):
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
            assert heard[key].tokens == reference.tokens(sound)
        else:
            assert key in cancelled


@pytest.mark.parametrize("kind", [*SPOKEN, *DELAYED])
def test_answers_differ_by_sound(folders: Checkpoints, kind: str) -> None:
    """Else the test above would prove little."""
    engine = engine_of(folders[kind])
    for key in range(3):
        add(engine, key, noise(1.0, key))
    heard = [tuple(result.tokens) for result in run(engine).values()]
    assert len(set(heard)) == 3
    assert len({token for tokens in heard for token in tokens}) > 5


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", SPOKEN)
def test_prompts_name_the_language_as_transformers_does(
    folders: Checkpoints, references: Callable[[str], Reference], kind: str
) -> None:
    engine, reference = engine_of(folders[kind]), references(kind)
    sound = noise(1.3, 4)
    for key, language in enumerate(("de", "fr")):
        add(engine, key, sound, language=engine.family.code({"de": "German"}.get(language, "fr")))
        result = run(engine)[key]
        assert result.tokens == reference.tokens(sound, language=language)
        assert result.language == language
    with refuses(BadRequest, "language"):
        add(engine, 9, sound, language="xx")
    with refuses(BadRequest, "task"):
        add(engine, 9, sound, task="translate")
    with refuses(UnsupportedParameter, "timestamp_granularities"):
        engine.family.check_words()


def test_voxtral_s_prompts_are_those_of_mistral_common(
    folders: Checkpoints, references: Callable[[str], Reference]
) -> None:
    engine, reference = engine_of(folders["voxtral"]), references("voxtral")
    for seconds in (0.4, 31.0):
        for language in ("", "en", "pt"):
            wanted = reference.inputs(noise(seconds), language=language)
            ids = wanted["input_ids"][0].tolist()
            options = TranscriptionOptions(language=language)
            assert engine.family.prompt(options, ids.count(24)) == ids  # type: ignore[attr-defined]
    with refuses(UnsupportedParameter, "prompt"):
        add(engine, 9, noise(0.4), prompt="so")


@pytest.mark.long(after=1)
def test_qwen_reads_a_given_text_and_names_the_language(
    folders: Checkpoints, references: Callable[[str], Reference]
) -> None:
    engine, reference = engine_of(folders["qwen3_asr"]), references("qwen3_asr")
    sound = noise(0.9, 2)
    add(engine, 0, sound, prompt="circles, squares")
    assert run(engine)[0].tokens == reference.tokens(sound, prompt="circles, squares")
    for prompt in ("<|im_end|>", "see <|audio_pad|>", "long " * 5000):
        with refuses(BadRequest, "prompt"):
            add(engine, 1, sound, prompt=prompt)
    family: Any = engine.family
    said = reference.tokenizer("language German<asr_text> rot")["input_ids"]
    assert family.language_of(said) == "de"
    assert family.text_of(said) == "rot"
    assert family.language_of(said[-4:]) == ""
    assert family.text_of(said[-4:]) == "rot"


# ------------------------------------------------------------------------------------------------ streams
def stream_of(engine: Engine, sound: Any, step: int) -> tuple[Any, list[int]]:
    """Feed a live stream in pieces of `step` samples; return it at its end, and its tokens."""
    stream, key, tokens = engine.family.open_stream(), 0, []
    for start in range(0, len(sound) + step, step):
        piece = sound[start : start + step]
        for chunk in stream.feed(piece) if len(piece) else stream.finish():
            key += 1
            engine.add(key, chunk, chunk.seconds, TranscriptionOptions())
            result = run(engine)[key]
            tokens += result.tokens
            stream.hear(result)
    return stream, tokens


def voxtral_streamed(reference: Reference, sound: Any, delay: int, left: int) -> list[int]:
    """Return transformers' tokens of a stream: the first chunk, then frame by frame."""
    after = -len(sound) % 1280 + (delay + 11) * 1280
    padded = np.pad(sound, (left * 1280, after + 1680)).astype(np.float32)
    frames = (len(sound) + after) // 1280 + left
    prompt = 1 + left + delay

    def mel(begin: int, end: int, center: bool) -> Any:
        options = {"sampling_rate": RATE, "center": center, "return_tensors": "pt"}
        return reference.extractor(padded[begin:end], **options).input_features

    def generator() -> Iterator[Any]:
        yield mel(0, (prompt * 8 - 1) * 160 + 200, True)
        for frame in range(prompt, frames):
            begin = frame * 1280 - 200
            yield mel(begin, begin + 1680, False)

    ids = torch.tensor([[1] + [32] * (prompt - 1)])
    options = {"input_features": generator(), "num_delay_tokens": delay}
    found = reference.model.generate(input_ids=ids, **options)[0].tolist()
    return reference.without_end(found[prompt:])


@pytest.mark.long(after=1)
def test_voxtral_s_stream_says_what_transformers_says_of_its_chunks(
    folders: Checkpoints, references: Callable[[str], Reference]
) -> None:
    kind = "voxtral_realtime"
    engine, reference = engine_of(folders[kind]), references(kind)
    family = engine.family
    assert isinstance(family, VoxtralRealtime)
    assert (family.delay, family.live_delay, family.left) == (6, 2, 32)
    assert family.delay_of(family.live_delay) <= DELAY < family.delay_of(family.live_delay + 1)
    for seed in (3, 5):
        sound = noise(2.3, seed)
        wanted = voxtral_streamed(reference, sound, family.live_delay, family.left)
        assert len(set(wanted)) > 3
        for step in (160, 3000, 1 << 20):
            stream, tokens = stream_of(engine, sound, step)
            assert tokens == wanted
            text = "".join(word.text for word in stream.words)
            assert text.split() == family.text_of(wanted).replace("\ufffd", " ").split() or text


@pytest.mark.long(after=1)
def test_kyutai_s_stream_says_what_transformers_says_of_the_recording(
    folders: Checkpoints, references: Callable[[str], Reference]
) -> None:
    kind = "kyutai_speech_to_text"
    engine, reference = engine_of(folders[kind]), references(kind)
    sound = noise(2.3, 4)
    wanted = reference.tokens(sound)
    assert len(set(wanted)) > 3
    live = resampled(sound)
    for step in (240, 5000, 1 << 20):
        _, tokens = stream_of(engine, live, step)
        assert tokens[: len(wanted)] == wanted


@pytest.mark.parametrize("kind", DELAYED)
def test_frames_wait_for_no_more_audio_than_they_need(folders: Checkpoints, kind: str) -> None:
    """A frame of 80 ms is encoded as soon as it is complete, whatever the size of the pieces."""
    engine = engine_of(folders[kind])
    family = engine.family
    assert isinstance(family, DelayedStreams)
    stream, rate = family.open_stream(), family.stream_rate
    sound = np.zeros(2 * rate, np.float32)
    covered = -family.silence()[0] / rate
    begun = False
    for start in range(0, len(sound), 160):
        chunks = stream.feed(sound[start : start + 160])
        covered += sum(chunk.seconds for chunk in chunks)
        begun = begun or bool(chunks)
        if begun:
            assert (start + 160) / rate - covered <= family.frame + 0.01
    assert begun
    assert covered > 1.8


@pytest.mark.parametrize("kind", DELAYED)
def test_streams_of_many_callers_are_decoded_together(folders: Checkpoints, kind: str) -> None:
    engine = engine_of(folders[kind])
    sounds = [noise(2.0, seed) for seed in range(3)]
    alone = [stream_of(engine, sound, 1 << 20)[0].words for sound in sounds]
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


def test_kyutai_times_words_by_its_frames_and_delay(folders: Checkpoints) -> None:
    engine = engine_of(folders["kyutai_speech_to_text"])
    engine.family.check_words()
    add(engine, 0, noise(2.0, 1))
    result = run(engine)[0]
    words = [w for segment in engine.family.segments(result, 2.0, True) for w in segment.words]
    frames = {index for index, token in enumerate(result.tokens) if token > 3}
    assert words
    for word in words:
        place = round((word.start + 0.24) / 0.08)  # the delay of the text, and silence before it
        assert place in frames or word.start in (0.0, 2.0)
    with refuses(UnsupportedParameter, "timestamp_granularities"):
        engine_of(folders["voxtral_realtime"]).family.check_words()


def test_what_computes_no_numbers_ends_its_window_and_nothing_else(folders: Checkpoints) -> None:
    engine = engine_of(folders["qwen3_asr"])
    add(engine, 0, noise(1.0, 1))
    good = run(engine)[0].tokens
    spoiled = noise(1.0, 2)
    spoiled[100] = float("nan")
    add(engine, 1, spoiled)
    add(engine, 2, noise(1.0, 1))
    ended = {output.key: output for _ in range(600) for output in engine.step()}
    assert isinstance(ended[1].error, InternalError)
    assert ended[2].result is not None
    assert ended[2].result.tokens == good
    engine.check_integrity()


def test_a_tokenizer_of_another_model_is_refused(folders: Checkpoints, tmp_path: Any) -> None:
    for kind, name in (("qwen3_asr", "chat_template.jinja"), ("voxtral_realtime", "tekken.json")):
        folder = tmp_path / kind
        folder.mkdir()
        for path in folders[kind].iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        text = (folder / name).read_text()
        changed = text.replace("<|audio_pad|>", "").replace("[STREAMING_PAD]", "[PADDING]")
        assert changed != text
        (folder / name).write_text(changed)
        with refuses(ConfigError, "model"):
            engine_of(folder)


def test_a_window_that_cannot_be_encoded_fails_alone(folders: Checkpoints) -> None:
    engine = engine_of(folders["qwen3_asr"])
    add(engine, 0, noise(1.0, 1))
    good = run(engine)[0].tokens
    for key in (1, 2):
        add(engine, key, noise(1.0, 1))
    engine._waiting[1].features = torch.zeros(3, 100)  # bands that the encoder does not have
    ended = {output.key: output for _ in range(600) for output in engine.step()}
    assert isinstance(ended[2].error, InternalError)
    assert ended[1].result is not None
    assert ended[1].result.tokens == good
    engine.check_integrity()
