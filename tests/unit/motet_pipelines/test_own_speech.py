"""Estimates of when words of a reply are spoken by the model that writes it."""

from __future__ import annotations

from motet_pipelines.voice.conversation.spoken_words import SpokenWords
from motet_pipelines.voice.own_speech import word_times
from motet_shared.messages import Audio

SECOND = bytes(48_000)  # PCM at 24 kHz


def test_letters_take_equally_long() -> None:
    assert word_times("Two red  ones.", 10) == [("Two", 0, 30), ("red", 40, 70), ("ones.", 90, 140)]


def test_scripts_without_spaces_and_long_words_are_cut() -> None:
    assert [word for word, _, _ in word_times("你好 abc世", 10)] == ["你", "好", "abc", "世"]
    assert [len(word) for word, _, _ in word_times("x" * 40, 10)] == [16, 16, 8]


def test_a_reply_is_cut_to_what_was_heard() -> None:
    """At a usual pace while it is spoken; at its own, four times slower here, once it is."""
    text = "one two three four"
    words = SpokenWords()
    words.write(text)
    words.note([Audio(SECOND[:24_000], word_times(text, 70.0))])
    assert words.heard(500) == "one two"
    words.note([Audio(SECOND * 5, word_times(text, 70.0))])
    words.note([Audio(b"", word_times(text, words.ms / len(text)), text=len(text))])
    assert words.heard(2400) == "one two"
    words.cut(1500)
    assert words.text == "one"
