"""Where text is cut for speech: by a table, and the same however it arrives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_shared.text.sentences import LONGEST, Chunk, Cutter, cut

# Chunks are written with a bar between them.
TABLE = {
    "plain": "Hello there. | How are you? | I'm fine!",
    "decimals": "Pi is 3.14 and e is 2.71. | The price is 1,234.50 in all.",
    "thousands": "We have sold about 1,000 of them.",
    "titles": "Dr. Smith met Mrs. Jones and Prof. Li and St. Nicholas. | They ate.",
    "latin": "Use a tool, e.g. a saw, | i.e. something sharp, etc. and go on.",
    "initials": "J. R. R. Tolkien wrote it. | So did I. | And you?",
    "numbers": "Take No. 5 on Jan. 3. | No. | That is wrong.",
    "dots": "The U.S. economy grew at 9 a.m. on Monday. | Really.",
    "ellipsis": "Well... maybe it does. | Or... | Not at all.",
    "quotes": '"Stop!" | "Really?" he asked. | (Yes.) | Done.',
    "web": "Visit https://example.com/a.b?c=d&e=f. | Mail me@example.org! | Version 1.2.3 is out.",
    "emoji": "Great job! | 🎉 | Let's go 🚀 | Now it begins.",
    "list": "Here it is\n | 1. First item\n | 2. Second item\n | - a dash",
    "paragraphs": "A wrapped\nline goes on\n\n | A new one does not",
    "clause": "Well, of course, | that is a long way to go, isn't it? | But, as you know, we can.",
    "no clause": "Yes, no, maybe.",
    "marks": "Wait?! | What!!! | **Bold.** | _So._ | `Code.`",
    "japanese": "今日は。 | 元気ですか？ | はい。",
    "abbreviation at the end": "We open at 9 a.m. | We close at 5 p.m.",
    "empty": "",
    "blank": " \n\n ",
}


def test_a_first_clause_is_long_enough() -> None:
    assert [c.text for c in cut("Of course, we can.")] == ["Of course, we can."]
    assert [c.text for c in cut("Of course we can, my friend.")] == [
        "Of course we can,",
        "my friend.",
    ]
    assert [c.text for c in cut("Of course we can, my friend.", begun=True)] == [
        "Of course we can, my friend."
    ]


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str) -> None:
    expected = [part.strip() for part in TABLE[name].split("|") if part.strip()]
    text = TABLE[name].replace("| ", "").replace("|", "")
    chunks = cut(text)
    assert [chunk.text for chunk in chunks] == expected
    check_cover(text, chunks)


def check_cover(text: str, chunks: list[Chunk]) -> None:
    """The chunks are in order, each where it says it is, and between them there is only space."""
    at = 0
    for chunk in chunks:
        assert text[at : chunk.start].strip() == ""
        assert text[chunk.start : chunk.end].strip() == chunk.text != ""
        at = chunk.end
    assert text[at:].strip() == ""


def test_a_cut_comes_as_soon_as_it_is_certain() -> None:
    cutter = Cutter()
    assert cutter.push("Hello there") == []
    assert cutter.push(".") == []  # "Hello there.com"?
    assert cutter.push(" ") == []  # "Hello there. and so on"
    assert [chunk.text for chunk in cutter.push("H")] == ["Hello there."]
    assert [chunk.text for chunk in cutter.flush()] == ["H"]


def test_a_sentence_without_end_is_cut_at_a_comma_or_a_space() -> None:
    words = cut("word " * 200)
    assert all(LONGEST - 6 < len(chunk.text) <= LONGEST for chunk in words[:-1])
    assert all(chunk.text.startswith("word") and chunk.text.endswith("word") for chunk in words)
    first, *_ = cut("a " * 100 + "b, " + "c " * 100, begun=True)
    assert first.text.endswith("b,")
    assert [len(chunk.text) for chunk in cut("x" * 600)] == [LONGEST, LONGEST, 600 - 2 * LONGEST]


PIECES = st.lists(
    st.sampled_from(
        'Hello |there|. |.|..|! |?|"|3|.14|1,|000|Dr. |e.g. |, and so on '.split("|")
        + "|\n|\n\n|- |1. |🎉|🎉 |And |then |a.b.com |。|あ|  |x y z ".split("|")
    )
)


@given(pieces=PIECES, longest=st.sampled_from([20, LONGEST]))
def test_however_it_arrives_it_is_cut_the_same(pieces: list[str], longest: int) -> None:
    text = "".join(pieces)
    whole = Cutter(longest=longest)
    expected = whole.push(text) + whole.flush()
    check_cover(text, expected)
    assert all(len(chunk.text) <= longest for chunk in expected)
    for arrival in (pieces, list(text)):
        cutter = Cutter(longest=longest)
        assert [
            chunk for piece in arrival for chunk in cutter.push(piece)
        ] + cutter.flush() == expected


@pytest.mark.timeout(20)
@pytest.mark.parametrize("stops", [".", "!?", "…", "🎉", ".)"])
def test_runs_of_stops_take_linear_time(stops: str) -> None:
    text = stops * 30_000 + "a"
    chunks = cut(text)
    check_cover(text, chunks)
    assert len(chunks) > 100
