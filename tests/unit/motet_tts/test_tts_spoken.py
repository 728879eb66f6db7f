"""How written words are spoken, and when."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_tts.text_normalization import spoken, spoken_words
from motet_tts.timing import Pace, WordTime, distribute_words, words_from_starts

TABLE = {
    "21": "twenty-one",
    "3.14,": "three point one four,",
    "1,234.50": "one thousand two hundred and thirty-four point five zero",
    "-5": "minus five",
    "007": "zero zero seven",
    "1st": "first",
    "22nd.": "twenty-second.",
    "1999": "nineteen ninety-nine",
    "2026?": "twenty twenty-six?",
    "1990s": "nineteen nineties",
    "2026-11-21": "november twenty-first twenty twenty-six",
    "10:30": "ten thirty",
    "9:05am": "nine oh five a m",
    "12:00": "twelve o'clock",
    "$5.20": "five dollars and twenty cents",
    "$1": "one dollar",
    "£0.50": "fifty pence",
    "$3.5M": "three point five million dollars",
    "50%": "fifty percent",
    "5-10": "five to ten",
    "20°C": "twenty degrees celsius",
    "5km": "five kilometers",
    "1kg": "one kilogram",
    "60km/h": "sixty kilometers per hour",
    "1.2.3": "one point two point three",
    "Dr.": "doctor",
    "e.g.": "for example",
    "etc.": "et cetera",
    "&": "and",
    "AT&T": "AT and T",
    "CPU": "C P U",
    "GPUs": "G P U's",
    "NASA": "NASA",
    "U.S.": "U S",
    "https://www.example.com/a-b?c=1": "example dot com slash a dash b",
    "me@example.org,": "me at example dot org,",
    "example.com.": "example dot com.",
    "(hello)": "(hello)",
    "**bold**": "bold",
    "_so_": "so",
    "`code`": "code",
    "and/or": "and or",
    "B2B": "B two B",
    "🎉": "",
    "great🎉!": "great!",
    "—": "",
    "...": "",
    "#": "",
    "it’s": "it's",
    "naïve": "naïve",
}


@pytest.mark.parametrize("written", TABLE)
def test_the_table(written: str) -> None:
    assert spoken(written) == TABLE[written]


def test_each_written_word_has_its_spoken_form() -> None:
    assert spoken_words("Pay $5 to [Ann](https://x.y) — now 🎉") == [
        ("Pay", "Pay"),
        ("$5", "five dollars"),
        ("to", "to"),
        ("Ann", "Ann"),
        ("—", ""),
        ("now", "now"),
        ("🎉", ""),
    ]


@given(st.text(max_size=30))
def test_no_digit_is_left_and_nothing_fails(text: str) -> None:
    for _, said in spoken_words(text):
        assert not any(letter in "0123456789" for letter in said), said
        assert said == said.strip()


# ----------------------------------------------------------------------------------------------------------- timing
WORDS = [("Hi,", "Hi,"), ("🎉", ""), ("21", "twenty-one"), ("x.", "x.")]


def test_time_is_shared_out_by_length() -> None:
    times = distribute_words(WORDS, 1000.0, 500.0)
    assert [word for word, _, _ in times] == ["Hi,", "🎉", "21", "x."]
    assert times[0][1] == 1000
    assert times[-1][2] == 1500
    assert all(a[2] == b[1] for a, b in itertools.pairwise(times))
    lengths = {word: end - start for word, start, end in times}
    assert lengths["🎉"] == 0
    assert lengths["21"] > lengths["x."] > 0
    assert distribute_words([("…", "")], 5.0, 100.0) == [("…", 5, 5)]


def test_what_the_model_tells_is_exact() -> None:
    times = words_from_starts(WORDS, [20.0, 100.0, 250.0], 1000.0, letter_ms=10.0, length=300.0)
    assert times == [
        ("Hi,", 1020, 1100),
        ("🎉", 1100, 1100),
        ("21", 1100, 1250),
        ("x.", 1250, 1300),
    ]


def test_what_is_not_yet_spoken_follows_at_the_pace() -> None:
    weights = 10 * (len("twenty-one") + 1), 10 * (len("x.") + 1 + 5)
    times = words_from_starts(WORDS, [20.0, 100.0], 1000.0, letter_ms=10.0)
    ends = 1100 + weights[0], 1100 + sum(weights)
    assert times == [
        ("Hi,", 1020, 1100),
        ("🎉", 1100, 1100),
        ("21", 1100, ends[0]),
        ("x.", ends[0], ends[1]),
    ]
    assert words_from_starts(WORDS, [], 5.0, letter_ms=0.0) == [(word, 5, 5) for word, _ in WORDS]


def test_the_pace_is_learnt() -> None:
    pace = Pace()

    def estimated(voice: str) -> list[WordTime]:
        return words_from_starts(WORDS, [], 0.0, letter_ms=pace.of(voice))

    before = estimated("anna")
    for _ in range(20):
        pace.update("anna", WORDS, 2000.0)
    after = estimated("anna")
    assert before[-1][2] != after[-1][2]
    assert after[-1][2] == pytest.approx(2000, abs=2)
    assert estimated("ben") == before
