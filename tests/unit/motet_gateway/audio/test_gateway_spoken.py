"""Which words were heard, whatever was written, spoken and cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from motet_pipelines.voice.conversation.spoken_words import SpokenWords
from motet_shared.messages import Audio

TEXT = "One, two. Three four!"
WORDS = [[("One,", 0, 100), ("two.", 100, 200)], [("Three", 200, 300), ("four!", 300, 400)]]
ENDS = {100: "One,", 200: "One, two.", 300: "One, two. Three", 400: TEXT}


def sound(ms: int) -> bytes:
    return bytes(48 * ms)


def whole() -> SpokenWords:
    spoken = SpokenWords()
    spoken.write(TEXT)
    for number, (words, end) in enumerate(zip(WORDS, (9, 21), strict=True)):
        spoken.note([Audio(sound(50), words, number), Audio(sound(150), words, number, end)])
    return spoken


def expected(ms: int) -> str:
    return max((text for end, text in ENDS.items() if end <= ms), key=len, default="")


@given(st.integers(0, 400))
def test_words_are_heard_to_their_end(ms: int) -> None:
    assert whole().heard(ms) == expected(ms)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=4))
def test_cuts_only_take_away(cuts: list[int]) -> None:
    spoken = whole()
    for ms in sorted(cuts, reverse=True):
        spoken.cut(ms)
        assert (spoken.text, spoken.ms) == (expected(ms), ms)


def test_what_comes_after_a_cut_does_not_count() -> None:
    spoken = SpokenWords()
    spoken.write("One, two.")
    spoken.note([Audio(sound(150), WORDS[0], 0)])
    assert spoken.spoken == len("One,")
    spoken.cut(120)
    spoken.write(" Three")
    spoken.note([Audio(sound(150), [], 0, 9)])
    assert (spoken.text, spoken.ms) == ("One,", 120)


def test_the_same_word_twice_is_two_words() -> None:
    spoken = SpokenWords()
    spoken.write("no no no")
    spoken.note([Audio(sound(300), [("no", 0, 100), ("no", 100, 200), ("no", 200, 300)], 0)])
    assert [spoken.heard(ms) for ms in (99, 100, 200, 300)] == ["", "no", "no no", "no no no"]
