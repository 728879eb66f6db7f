"""Where the speech models' data come from: words, sentences, voices, espeak-ng and what happens to its samples."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("espeakng_loader")

from recipes.speech import noise as speech_noise
from recipes.speech.espeak import Voice, speak
from recipes.speech.general import general
from recipes.speech.lexicon import article, number, plural, sections, verbs, words
from recipes.speech.noise import CLEAN, RATE, Conditions, apply_conditions, resample
from recipes.speech.sentences import (
    CATEGORIES,
    HELD_OUT_SHARE,
    is_held_out,
    normalize_words,
    sample_sentence,
    spoken_form,
    training_utterance,
)
from recipes.speech.voices import HELD_OUT_VARIANTS, VARIANTS, draw_voice
from recipes.training.errors import RecipeError

EVERYTHING = Conditions(room=1, noise=1, telephone=1, clipping=1)

# Words


def test_the_word_list_is_large_and_its_sections_hold_no_word_twice() -> None:
    assert len(words(*(name for name in sections() if name != "irregular"))) > 2500
    for name, entries in sections().items():
        assert len(set(entries)) == len(entries), name
        assert all(entry.replace(" ", "").isalpha() for entry in entries), name


@pytest.mark.parametrize(
    ("kind", "forms"),
    [
        ("transitive", "carry carries carrying carried carried"),
        ("transitive", "stop stops stopping stopped stopped"),
        ("transitive", "offer offers offering offered offered"),
        ("intransitive", "die dies dying died died"),
        ("intransitive", "agree agrees agreeing agreed agreed"),
        ("irregular", "begin begins beginning began begun"),
        ("irregular", "go goes going went gone"),
    ],
)
def test_verbs_are_inflected(kind: str, forms: str) -> None:
    assert tuple(forms.split()) in verbs(kind)


def test_nouns_numbers_and_articles() -> None:
    assert [
        plural(noun) for noun in ("city", "boy", "fox", "child", "knife")
    ] == "cities boys foxes children knives".split()
    assert [article(word) for word in ("hour", "university", "egg", "user")] == [
        "an hour",
        "a university",
        "an egg",
        "a user",
    ]
    assert number(342) == "three hundred and forty-two"
    assert number(21_005) == "twenty-one thousand and five"
    with pytest.raises(RecipeError) as refused:
        number(1_000_000)
    assert refused.value.param == "value"


# Sentences


def test_general_sentences_use_thousands_of_words() -> None:
    rng = Random(1)
    made = [general(rng) for _ in range(8000)]
    assert len({word for text in made for word in normalize_words(text).split()}) > 4000
    assert len(set(made)) > 7500
    assert max(len(text.split()) for text in made) <= 40


def test_signs_and_digits_are_spoken() -> None:
    assert spoken_form("What is 3+4?") == "What is three plus four?"
    assert spoken_form("12 - 5 =") == "Twelve minus five equals"
    assert spoken_form("1 red circle") == "One red circle"


@given(st.integers(0, 2**32), st.sampled_from(CATEGORIES))
@settings(max_examples=40)  # held-out answers are rare
def test_a_sentence_is_on_one_side_only_and_has_no_digits(seed: int, category: str) -> None:
    trained, kept = (
        sample_sentence(Random(seed), category),
        sample_sentence(Random(seed), category, held_out=True),
    )
    assert not is_held_out(trained)
    assert is_held_out(kept)
    assert is_held_out(
        kept.upper().rstrip(".?!")
    )  # case and punctuation make no other sentence of it
    assert normalize_words(trained) != normalize_words(kept)
    assert not any(char.isdigit() for char in trained + kept)


def test_about_one_sentence_in_32_is_held_out() -> None:
    rng = Random(2)
    share = sum(is_held_out(general(rng)) for _ in range(6000)) / 6000
    assert 0.5 / HELD_OUT_SHARE < share < 1.5 / HELD_OUT_SHARE


def test_training_never_says_a_held_out_sentence() -> None:
    rng = Random(3)
    assert not any(
        is_held_out(training_utterance(rng, general_share=0.5).text) for _ in range(2000)
    )


def test_unknown_categories_are_refused() -> None:
    with pytest.raises(RecipeError) as refused:
        sample_sentence(Random(0), "weather")
    assert refused.value.param == "category"


# Voices


def test_training_and_held_out_voices_share_no_setting() -> None:
    assert not set(VARIANTS) & set(HELD_OUT_VARIANTS)
    rng = Random(4)
    trained = [draw_voice(rng) for _ in range(500)]
    kept = [draw_voice(rng, held_out=True) for _ in range(500)]
    assert len({voice.name for voice in trained}) > 100
    assert not {voice.name for voice in trained} & {voice.name for voice in kept}
    assert not {voice.pitch for voice in trained} & {voice.pitch for voice in kept}


@pytest.mark.parametrize("variant", [*VARIANTS, *HELD_OUT_VARIANTS])
def test_every_voice_speaks(variant: str) -> None:
    speech = speak("Good morning.", Voice(name=f"en-us+{variant}" if variant else "en-us"))
    assert 0.3 < speech.seconds < 3
    assert float(np.abs(speech.samples).max()) > 0.02


def test_unknown_voices_are_refused() -> None:
    with pytest.raises(RecipeError) as refused:
        speak("Hello.", Voice(name="xx-nowhere"))
    assert refused.value.param == "voice"


def test_speech_is_the_same_again_and_its_marks_are_in_order() -> None:
    text = "From left to right: a red circle, and a blue square."
    voice = draw_voice(Random(5))
    first = speak(text, voice)
    speak("Something else.", Voice(name="en+f2"))
    again = speak(text, voice)
    np.testing.assert_array_equal(first.samples, again.samples)
    marked = [normalize_words(text[mark.character :]).split()[0] for mark in first.words]
    assert marked == normalize_words(text).split()
    assert [mark.second for mark in first.words] == sorted(mark.second for mark in first.words)
    assert len(first.phonemes) > 20
    assert first.phonemes[-1].second <= first.seconds + 0.05


# Rooms and noise


def test_resampling_keeps_a_tone() -> None:
    tone = np.sin(2 * np.pi * 1000 * np.arange(22_050) / 22_050).astype(np.float32)
    want = np.sin(2 * np.pi * 1000 * np.arange(16_000) / 16_000)
    inner = slice(100, -100)  # silence is next to the ends
    assert len(resample(tone, 22_050)) == len(want)
    np.testing.assert_allclose(resample(tone, 22_050)[inner], want[inner], atol=1e-3)


def test_a_clip_is_a_function_of_its_randomness_and_stays_in_range() -> None:
    speech = speak("Is there a red circle?", Voice())
    once, before = apply_conditions(speech, np.random.default_rng(6), EVERYTHING)
    again, _ = apply_conditions(speech, np.random.default_rng(6), EVERYTHING)
    other, _ = apply_conditions(speech, np.random.default_rng(7), EVERYTHING)
    np.testing.assert_array_equal(once, again)
    assert len(other) != len(once) or not np.array_equal(once, other)
    assert np.abs(once).max() <= 1
    assert before < len(once) / RATE


def test_a_clean_clip_starts_with_silence_and_keeps_its_level() -> None:
    wave, before = apply_conditions(speak("Hello there.", Voice()), np.random.default_rng(0), CLEAN)
    assert before == pytest.approx(0.2)
    assert np.abs(wave[: int(0.19 * RATE)]).max() < 1e-3
    assert np.abs(wave).max() == pytest.approx(10 ** (-6 / 20), rel=0.01)


@pytest.mark.parametrize("slope", [0.0, 1.0, 2.0])
def test_coloured_noise_has_its_slope(slope: float) -> None:
    noise = speech_noise.coloured(np.random.default_rng(8), 64_000, slope)
    power = np.abs(np.fft.rfft(noise)) ** 2
    low, high = power[1000:2000].mean(), power[8000:16_000].mean()
    assert 10 * np.log10(low / high) == pytest.approx(9 * slope, abs=1.0)


def test_a_telephone_passes_a_narrow_band() -> None:
    noise = speech_noise.coloured(np.random.default_rng(9), 32_000, 0)
    power = np.abs(np.fft.rfft(speech_noise.telephone_band(noise))) ** 2
    hertz = np.fft.rfftfreq(32_000, 1 / RATE)
    outside = power[(hertz < 250) | (hertz > 3600)].mean()
    assert outside < 0.02 * power[(hertz > 400) & (hertz < 3300)].mean()


def test_babble_and_hum_have_unit_power() -> None:
    rng = np.random.default_rng(10)
    for noise in (speech_noise.babble(rng, 20_000), speech_noise.hum(rng, 20_000)):
        assert float(np.mean(noise**2)) == pytest.approx(1.0, rel=1e-3)
