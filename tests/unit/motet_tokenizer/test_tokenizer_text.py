"""The whole way from ids to text: replay, ends, and the pieces in the right order."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_shared.messages import Text
from motet_shared.tool_formats.hermes import HermesParser
from motet_tokenizer.text import TextState
from support.checkpoints.tiny_tokenizers import EOS, byte_level, id_of, vocabulary

MODEL = vocabulary()
CALL = '<tool_call>\n{"name": "draw", "arguments": {"shape": "👩‍🚀 star"}}\n</tool_call>'
IDS = st.lists(
    st.one_of(
        st.integers(0, MODEL.size - 1), st.sampled_from(byte_level().encode(CALL + "ab").ids)
    ),
    max_size=40,
)
STOPS = st.lists(st.sampled_from(["a", "ab", "\n", "é", "}}", "�", "the red"]), max_size=2)


def new_state(
    stops: Sequence[str] = (), tools: bool = False, max_tokens: int = 1000, echo: str = ""
) -> TextState:
    return TextState(
        MODEL.detokenizer(),
        end_ids=frozenset({EOS}),
        max_tokens=max_tokens,
        stops=stops,
        tools=HermesParser("r") if tools else None,
        echo=echo,
    )


def joined(pieces: list[Text]) -> tuple[str, list[int], str]:
    """Text, ids consumed, and the tool calls as one string."""
    deltas = [delta for piece in pieces for delta in piece.tools or ()]
    calls = "".join([f"[{d.index} {d.name}]" * bool(d.name) + d.arguments for d in deltas])
    return (
        "".join([piece.text for piece in pieces]),
        [i for piece in pieces for i in piece.ids],
        calls,
    )


def length(pieces: list[Text]) -> int:
    """As a client counts: see `messages.Resume`."""
    return sum(len(p.text) + sum(len(delta.arguments) for delta in p.tools or ()) for p in pieces)


def feed(state: TextState, ids: list[int], cuts: list[int]) -> list[Text]:
    pieces, at = [], 0
    for cut in [*cuts, len(ids)]:
        if at < len(ids) and not state.status:
            pieces.append(state.feed(ids[at : at + cut]))
            at += cut
    return pieces


@given(IDS, st.lists(st.integers(1, 5), max_size=15), STOPS, st.booleans(), st.integers(1, 45))
def test_replay_in_any_grouping_restores_the_state(
    ids: list[int], cuts: list[int], stops: list[str], tools: bool, max_tokens: int
) -> None:
    first, second = new_state(stops, tools, max_tokens), new_state(stops, tools, max_tokens)
    pieces, again = feed(first, ids, cuts), feed(second, ids, [])
    assert joined(pieces) == joined(again)
    assert (first.status, first.tokens, first.length) == (
        second.status,
        second.tokens,
        second.length,
    )
    assert first.length == length(pieces)
    assert joined([first.finish("length")]) == joined([second.finish("length")])
    assert first.status == second.status


@given(IDS, st.integers(0, 40), STOPS, st.booleans())
def test_a_moved_stream_goes_on_where_it_was(
    ids: list[int], at: int, stops: list[str], tools: bool
) -> None:
    """Replay the first ids, throw their output away, and what comes next is what was missing."""
    steady, moved = new_state(stops, tools), new_state(stops, tools)
    before = feed(steady, ids[:at], [1] * at)
    replayed = moved.feed(ids[:at])
    assert moved.length == length(before)
    assert replayed.ids == joined(before)[1]
    if not steady.status:
        after = [steady.feed(ids[at:]), steady.finish("stop")]
        assert joined([moved.feed(ids[at:]), moved.finish("stop")]) == joined(after)


@given(IDS)
def test_without_stops_and_tools_it_is_plain_decoding(ids: list[int]) -> None:
    state = new_state()
    pieces = [*feed(state, ids, [1] * len(ids)), state.finish("length")]
    shown = ids[: ids.index(EOS)] if EOS in ids else ids
    assert joined(pieces)[0] == byte_level().decode(shown)


def ids_of(text: str) -> list[int]:
    return list(byte_level().encode(text).ids)


def test_an_end_token_completes_the_reply() -> None:
    state = new_state()
    piece = state.feed([*ids_of("done"), EOS, *ids_of("not this")])
    assert (piece.text, piece.ids[-1], state.status) == ("done", EOS, "stop")
    assert state.ended_by_token
    assert not state.stopped


def test_half_a_character_at_the_end_is_shown_as_replacement() -> None:
    state = new_state(max_tokens=2)
    ids = [id_of(byte_level(), "ð"), id_of(byte_level(), "Ł")]
    assert joined([state.feed(ids[:1])])[0] == ""
    assert joined([state.feed(ids[1:])])[0] == "�"
    assert state.status == "length"
    assert state.finish("stop") == Text("", [])


def test_a_stop_string_cuts_text_and_ids() -> None:
    state = new_state(stops=["circle"])
    ids = ids_of("The red circle is left")
    pieces = [state.feed(ids)]
    assert joined(pieces)[0] == "The red "
    assert state.stopped
    assert state.status == "stop"
    assert "circle" in byte_level().decode(pieces[0].ids)
    assert len(pieces[0].ids) < len(ids)


def test_the_beginning_of_a_stop_string_is_shown_if_no_more_comes() -> None:
    ids = ids_of("a red cir")
    state = new_state(stops=["circle"])
    assert state.feed(ids).text == "a red "
    assert state.finish("stop").text == "cir"
    assert new_state(stops=["circle"], max_tokens=len(ids)).feed(ids).text == "a red cir"


def test_a_stop_string_wins_over_the_last_token() -> None:
    ids = ids_of("The red.")
    state = new_state(stops=["."], max_tokens=len(ids))
    assert joined([state.feed(ids)])[0] == "The red"
    assert state.status == "stop"


@pytest.mark.parametrize(("ending", "status"), [([EOS], "tool_calls"), ([], "length")])
def test_tool_calls_have_a_status_of_their_own(ending: list[int], status: str) -> None:
    ids = ids_of("I draw.\n" + CALL)
    state = new_state(tools=True, max_tokens=len(ids) + bool(ending))
    text, _, calls = joined([state.feed([i]) for i in [*ids, *ending]])
    assert text == "I draw."
    assert calls.startswith("[0 draw]")
    assert json.loads(calls.removeprefix("[0 draw]")) == {"shape": "👩‍🚀 star"}
    assert state.status == status


def test_without_tools_the_tags_are_text() -> None:
    state = new_state()
    assert joined([state.feed(ids_of(CALL))])[0] == CALL


def test_echo_goes_out_with_the_first_tokens() -> None:
    state = new_state(echo="Once")
    ids = ids_of(" upon")
    assert state.feed(ids).text == "Once upon"
    assert state.feed(ids).text == " upon"
    assert state.length == len("Once upon upon")
    assert new_state(echo="Once").finish("stop").text == "Once"
