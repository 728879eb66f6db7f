"""Stop strings against a reference that looks at the text one character at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from motet_tokenizer.stops import StopStrings

LETTERS = st.text("ab\nc", max_size=30)
STOPS = st.lists(st.text("ab\nc", min_size=1, max_size=5), min_size=1, max_size=3)
CHUNKS = st.lists(st.text("ab\nc", max_size=6), max_size=10)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first, and whether there is one."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(CHUNKS, STOPS)
def test_cut_exactly_before_the_first_stop(chunks: list[str], stops: list[str]) -> None:
    state = StopStrings(stops)
    got = "".join([state.feed(chunk) for chunk in chunks])
    text, hit = reference("".join(chunks), stops)
    assert state.hit == hit
    assert (got if hit else got + state.flush()) == text
    assert state.flush() == ""


@given(LETTERS, STOPS)
def test_what_has_come_out_depends_on_the_text_alone(text: str, stops: list[str]) -> None:
    single, whole = StopStrings(stops), StopStrings(stops)
    assert "".join([single.feed(char) for char in text]) == whole.feed(text)


@given(LETTERS, LETTERS, STOPS)
def test_nothing_is_sent_that_a_later_stop_takes_back(
    before: str, after: str, stops: list[str]
) -> None:
    state = StopStrings(stops)
    sent = state.feed(before)
    assert reference(before + after, stops)[0].startswith(sent)


@given(LETTERS, STOPS)
def test_no_more_is_held_back_than_may_belong_to_a_stop(text: str, stops: list[str]) -> None:
    state = StopStrings(stops)
    sent = state.feed(text)
    held = text[len(sent) :]
    assert state.hit or not held or any(stop.startswith(held) for stop in stops)


def test_nothing_comes_out_after_the_stop() -> None:
    state = StopStrings(["END"])
    assert state.feed("a EN") == "a "
    assert state.feed("D b") == ""
    assert state.hit
    assert state.feed("c") == ""
    assert state.flush() == ""


def test_empty_stop_strings_are_no_stop_strings() -> None:
    state = StopStrings(["", ""])
    assert state.feed("abc") == "abc"
    assert not state.hit


@given(LETTERS, STOPS)
def test_the_stop_string_that_ended_the_text_is_known(text: str, stops: list[str]) -> None:
    state = StopStrings(stops)
    before = state.feed(text)
    assert bool(state.found) == state.hit
    if state.hit:
        assert state.found in stops
        assert text.startswith(before + state.found)
