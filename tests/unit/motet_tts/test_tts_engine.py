"""The speech engine makes the very samples that transformers makes: alone, in company, and however they are cut."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoTokenizer,
    CsmForConditionalGeneration,
    PocketTTSAudioTokenizerModel,
    PocketTTSForConditionalGeneration,
    VitsModel,
)

from motet_shared.errors import BadRequest, ConfigError, Overloaded
from motet_tts.config import EngineConfig
from motet_tts.engine.engine import Engine
from motet_tts.engine.utterance import StepOutput, Utterance
from motet_tts.models.noise import hash_numbers
from support.checkpoints import tts_checkpoints
from support.running.refusals import refuses

# Of samples whose peaks are about 1: the order of float32 additions differs, nothing else. Latents are fed back as they
# are, so that in PocketTTS the difference grows over the frames.
TOLERANCE = 1e-4
TEXTS = (
    "hello there",
    "a",
    "the blue circle is left of the star",
    "no one knows",
    "seven small squares and one more",
)
FRAMES = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoints by family and options, each made once."""
    made: dict[Any, Path] = {}

    def make(family: str, **options: Any) -> Path:
        key = (family, *sorted(options.items()))
        if key not in made:
            makers: dict[str, Any] = dict(tts_checkpoints.MAKERS)
            made[key] = makers[family](tmp_path_factory.mktemp(family) / "model", **options)
        return made[key]

    return make


def engine(path: Path, **options: Any) -> Engine:
    return Engine(
        EngineConfig(model=str(path), **{"first_chunk": 0.002, "chunk": 0.008, **options})
    )


def say(text: str, voice: str, **options: Any) -> Utterance:
    return Utterance(words=tuple(text.split()), voice=voice, **{"max_frames": FRAMES, **options})


def finish(engine: Engine) -> dict[Any, list[StepOutput]]:
    """All pieces of everything that runs, by key."""
    pieces: dict[Any, list[StepOutput]] = {}
    while engine.has_work:
        for piece in engine.step():
            pieces.setdefault(piece.key, []).append(piece)
        engine.check_integrity()
    return pieces


def joined(pieces: list[StepOutput]) -> Tensor:
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return torch.cat([piece.samples for piece in pieces if piece.samples is not None])


def near(got: Tensor, wanted: Tensor) -> None:
    assert wanted.abs().max() > 0.01, "the reference is silent: nothing would be proved"
    torch.testing.assert_close(
        got, wanted, rtol=0, atol=TOLERANCE * max(1.0, float(wanted.abs().max()))
    )


# --------------------------------------------------------------------------------------------------- what is due
@torch.inference_mode()
def csm_reference(path: Path, text: str, voice: str, frames: int = FRAMES) -> Tensor:
    model = CsmForConditionalGeneration.from_pretrained(path).eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(path)(f"[{voice}]{text}")["input_ids"]])
    audio: Tensor = model.generate(ids, output_audio=True, max_new_tokens=frames, do_sample=False)[
        0
    ]
    return audio


@torch.inference_mode()
def pocket_reference(path: Path, text: str, voice: str, frames: int | None = FRAMES) -> Tensor:
    from safetensors.torch import load_file

    model = PocketTTSForConditionalGeneration.from_pretrained(path).eval()
    tokenizer = PocketTTSAudioTokenizerModel.from_pretrained(path / "audio_tokenizer").eval()
    config = model.config
    latents = load_file(path / "voices" / f"{voice}.safetensors")["audio_prompt"]
    ids = AutoTokenizer.from_pretrained(path)(text)["input_ids"]
    voice_ids = [
        config.audio_prompt_bos_token_id,
        *[config.audio_prompt_token_id] * latents.shape[1],
    ]
    output = model.generate(
        torch.tensor([[*voice_ids, *ids, config.audio_bos_token_id]]),
        attention_mask=torch.ones(1, len(voice_ids) + len(ids) + 1, dtype=torch.long),
        audio_prompt_latents=latents,
        frames_after_eos=torch.tensor([4 if len(text.split()) <= 4 else 2]),
        do_sample=False,
        return_dict_in_generate=True,
        **({"max_new_tokens": frames} if frames else {}),
    )
    audio: Tensor = tokenizer.decode(output.audio_latents).audio_values[0, 0]
    audio[:120] *= torch.linspace(0, 1, 120)  # the processor's fade-in of 5 ms
    return audio


@torch.inference_mode()
def vits_reference(path: Path, text: str, voice: str, seed: int = 0) -> Tensor:
    model = VitsModel.from_pretrained(path).eval()
    torch.manual_seed(hash_numbers(seed, 0))
    inputs = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")
    speaker = int(voice) if voice != "default" else None
    waveform: Tensor = model(**inputs, speaker_id=speaker).waveform[0]
    return waveform


REFERENCES: dict[str, Callable[..., Tensor]] = {
    "csm": csm_reference,
    "pocket_tts": pocket_reference,
    "vits": vits_reference,
}
VOICES = {"csm": ("0", "3"), "pocket_tts": tts_checkpoints.VOICES, "vits": ("default", "default")}


# -------------------------------------------------------------------------------------------------------- exactness
@pytest.mark.parametrize("family", REFERENCES)
def test_alone_it_is_what_transformers_makes(folder: Callable[..., Path], family: str) -> None:
    path = folder(family)
    for voice in dict.fromkeys(VOICES[family]):
        speaker = engine(path)
        speaker.add("a", say(TEXTS[0], voice))
        pieces = finish(speaker)["a"]
        near(joined(pieces), REFERENCES[family](path, TEXTS[0], voice))
        assert len(pieces) > 1, "it came in one piece: nothing streams"


@pytest.mark.parametrize("family", REFERENCES)
def test_in_company_it_is_the_same(folder: Callable[..., Path], family: str) -> None:
    path = folder(family)
    references = [
        REFERENCES[family](path, text, VOICES[family][i % 2]) for i, text in enumerate(TEXTS)
    ]
    speaker = engine(path, max_running=3)
    pieces: dict[Any, list[StepOutput]] = {}
    for number, text in enumerate(TEXTS):  # one joins with every second step, and some wait
        speaker.add(number, say(text, VOICES[family][number % 2]))
        for piece in speaker.step() + speaker.step():
            pieces.setdefault(piece.key, []).append(piece)
    for key, rest in finish(speaker).items():
        pieces.setdefault(key, []).extend(rest)
    for number, wanted in enumerate(references):
        near(joined(pieces[number]), wanted)


def test_pocket_tts_ends_where_transformers_ends(folder: Callable[..., Path]) -> None:
    """Without a limit of its own: at the end-of-speech logit and the frames after it, or at the budget of the text."""
    path = folder("pocket_tts")
    speaker = engine(path)
    lengths = set()
    for number, text in enumerate(TEXTS[:4]):
        speaker.add(number, say(text, "anna", max_frames=0))
    for number, pieces in finish(speaker).items():
        wanted = pocket_reference(path, TEXTS[number], "anna", None)
        near(joined(pieces), wanted)
        lengths.add(len(wanted))
    assert len(lengths) > 1


def test_csm_ends_at_its_end_code(folder: Callable[..., Path]) -> None:
    """A frame of end codes is not heard and is the last one. Weights are set so that one comes."""
    speaker = engine(folder("csm"))
    family: Any = speaker.model.family  # type: ignore[attr-defined]
    drawn = family.draw
    family.draw = lambda hidden, rows: (
        drawn(hidden, rows) if rows[0].frames < 4 else _ended(family, drawn(hidden, rows), rows)
    )
    speaker.add("a", say(TEXTS[0], "0"))
    audio = joined(finish(speaker)["a"])
    near(audio, csm_reference(folder("csm"), TEXTS[0], "0", 4))


def _ended(family: Any, frame: tuple[Tensor, list[bool], list[bool]], rows: list[Any]) -> Any:
    codes = torch.full_like(frame[0], family._eos)
    return codes, [not bool((code == family._eos).all()) for code in codes], [True for _ in rows]


def test_vits_with_speakers_and_plain_durations(folder: Callable[..., Path]) -> None:
    path = folder("vits", speakers=3, stochastic=False)
    speaker = engine(path)
    assert speaker.voices == ("0", "1", "2")
    for voice in speaker.voices:
        speaker.add(voice, say(TEXTS[3], voice))
    audio = {voice: joined(pieces) for voice, pieces in finish(speaker).items()}
    for voice in speaker.voices:
        near(audio[voice], vits_reference(path, TEXTS[3], voice))


@pytest.mark.parametrize("family", ["csm", "pocket_tts"])
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_however_it_is_cut_and_whoever_comes_and_goes(
    folder: Callable[..., Path], family: str, data: st.DataObject
) -> None:
    """Random arrivals, cancels and chunk sizes, with noise: each sentence is what it is alone."""
    path = folder(family, sample=True)
    chunks = st.sampled_from([0.002, 0.004, 0.006, 0.02])
    speaker = engine(
        path,
        first_chunk=data.draw(chunks),
        chunk=data.draw(chunks),
        max_running=data.draw(st.integers(1, 4)),
    )
    pieces: dict[Any, list[StepOutput]] = {}
    wanted: dict[int, Utterance] = {}
    for number in range(data.draw(st.integers(1, 5))):
        text, frames = data.draw(st.sampled_from(TEXTS)), data.draw(st.integers(1, 14))
        wanted[number] = say(
            text, data.draw(st.sampled_from(VOICES[family])), max_frames=frames, seed=number % 2
        )
        speaker.add(number, wanted[number])
        for _ in range(data.draw(st.integers(0, 4))):
            for piece in speaker.step():
                pieces.setdefault(piece.key, []).append(piece)
        if data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(sorted(wanted)))
            if pieces.get(victim, [StepOutput(0)])[-1].done is False:
                speaker.cancel(victim)
                pieces.pop(victim, None)
                del wanted[victim]
        speaker.check_integrity()
    for key, rest in finish(speaker).items():
        pieces.setdefault(key, []).extend(rest)
    assert sorted(pieces) == sorted(wanted)
    alone = _alone(path)
    for number, utterance in wanted.items():
        alone.add(number, utterance)
        near(joined(pieces[number]), joined(finish(alone)[number]))


@functools.cache
def _alone(path: Path) -> Engine:
    return engine(path)


# ------------------------------------------------------------------------------------------------------------ noise
@pytest.mark.parametrize("family", REFERENCES)
def test_noise_follows_seed_and_sentence(folder: Callable[..., Path], family: str) -> None:
    path = folder(family) if family == "vits" else folder(family, sample=True)
    speaker = engine(path)
    voice = VOICES[family][0]

    def speech(seed: int, index: int) -> Tensor:
        speaker.add(0, say(TEXTS[2], voice, seed=seed, index=index))
        return joined(finish(speaker)[0])

    again, first = speech(5, 1), speech(5, 1)
    assert torch.equal(again, first)
    for other in (speech(6, 1), speech(5, 2)):
        assert other.shape != first.shape or not torch.allclose(other, first, atol=1e-3)


def test_greedy_is_without_noise(folder: Callable[..., Path]) -> None:
    speaker = engine(folder("csm", sample=True), greedy=True)
    speaker.add(0, say(TEXTS[0], "0", seed=1))
    speaker.add(1, say(TEXTS[0], "0", seed=2))
    pieces = finish(speaker)
    assert torch.equal(joined(pieces[0]), joined(pieces[1]))


# ----------------------------------------------------------------------------------------------------- what it tells
def test_vits_tells_where_its_words_begin(folder: Callable[..., Path]) -> None:
    speaker = engine(folder("vits"))
    speaker.add("a", say("one two three", "default"))
    pieces = finish(speaker)["a"]
    starts = pieces[0].starts
    assert starts is not None
    assert all(piece.starts is None for piece in pieces[1:])
    assert 0 <= starts[0] < starts[1] < starts[2] < len(joined(pieces))
    model: Any = speaker.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hash_numbers(0, 0))
        ids = AutoTokenizer.from_pretrained(folder("vits"))("one two three")["input_ids"]
        durations, _ = model._latents(torch.tensor([ids]), None)
    letters = "one two three"
    for word, start in zip(("one", "two", "three"), starts, strict=True):
        assert start == int(durations[: 2 * letters.index(word) + 1].sum()) * 32


def test_words_that_no_letter_stands_for_are_silence(folder: Callable[..., Path]) -> None:
    speaker = engine(folder("vits"))
    speaker.add("a", Utterance(words=("…",), voice="default"))
    assert len(joined(finish(speaker)["a"])) == 0


def test_what_cannot_be_spoken_is_refused(folder: Callable[..., Path], tmp_path: Path) -> None:
    speaker = engine(folder("csm"), max_running=1, max_waiting=0)
    with refuses(BadRequest, "voice"):
        speaker.add("a", say(TEXTS[0], "zoe"))
    speaker.add("b", say("x" * 600, "0"))
    (piece,) = speaker.step()
    assert isinstance(piece.error, BadRequest)
    assert "leaves no room" in piece.error.message
    assert not speaker.has_work
    speaker.add("c", say(TEXTS[0], "0"))
    with pytest.raises(Overloaded):
        speaker.add("d", say(TEXTS[0], "0"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with refuses(ConfigError, "model"):
        engine(tmp_path)
    with refuses(ConfigError, "model"):
        engine(tmp_path / "none")


def test_a_cancelled_sentence_is_gone_before_the_next_step(folder: Callable[..., Path]) -> None:
    speaker = engine(folder("csm"))
    for key in "abc":
        speaker.add(key, say(TEXTS[2], "0", max_frames=40))
    speaker.step()
    speaker.cancel("b")
    assert {piece.key for _ in range(20) for piece in speaker.step()} == {"a", "c"}
    speaker.cancel("a")
    speaker.cancel("c")
    speaker.check_integrity()
    assert not speaker.has_work
