"""Items of a reply: the room that they take in a conversation, and what the model sees of them."""

from __future__ import annotations

from typing import Any

import pytest

from motet_pipelines.voice.conversation import history as history_module
from motet_pipelines.voice.conversation.events import Event, OutputClosed, OutputOpened
from motet_pipelines.voice.conversation.history import History, chat_messages, user_audio_item
from motet_pipelines.voice.conversation.reply_items import ReplyItems
from motet_pipelines.voice.conversation.spoken_words import SpokenWords
from motet_shared.errors import PayloadTooLarge
from motet_shared.messages import ToolCallDelta


def test_a_reply_is_not_refused_in_a_full_conversation() -> None:
    history, events = History(1), list[Event]()
    with pytest.raises(PayloadTooLarge):
        history.insert(user_audio_item("user"))
    items = ReplyItems("resp", history, {})
    items.text("Sure.", events)
    items.tool(ToolCallDelta(0, "call", "draw", "{}"), events)
    items.finish("completed", events)
    places = [type(event) for event in events if isinstance(event, OutputOpened | OutputClosed)]
    assert places == [OutputOpened, OutputClosed] * 2
    assert history.items() == items.items
    with pytest.raises(PayloadTooLarge) as refused:
        history.check_room("response")
    assert refused.value.param == "response"


def test_the_oldest_items_go_until_another_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_ITEMS", 3)
    history = History(1 << 20)
    for number in range(3):
        item = user_audio_item(f"item_{number}")
        assert history.drop_oldest(item) == []
        history.insert(item)
    item = user_audio_item("item_3")
    (dropped,) = history.drop_oldest(item)
    history.insert(item)
    assert dropped["id"] == "item_0"
    assert [kept["id"] for kept in history.items()] == ["item_1", "item_2", "item_3"]


@pytest.mark.parametrize("kept", [True, False])
def test_only_words_of_the_conversation_are_kept_for_truncation(kept: bool) -> None:
    spoken: dict[str, SpokenWords] = {}
    history, events = History(1 << 20), list[Event]()
    items = ReplyItems("resp", history if kept else None, spoken)
    items.write("Hello.", events)
    items.finish("completed", events)
    assert list(spoken) == ([items.items[0]["id"]] if kept else [])


def call(status: str, call_id: str = "call_1", arguments: str = "{}") -> dict[str, Any]:
    item = {"type": "function_call", "call_id": call_id, "name": "draw", "arguments": arguments}
    return {**item, "status": status}


def output(call_id: str = "call_1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "drawn"}


@pytest.mark.parametrize("status", ["incomplete", "in_progress"])
def test_a_call_that_was_not_completed_is_left_out_with_its_result(status: str) -> None:
    cut = call(status, arguments='{"p":')
    whole = [call("completed", "call_2"), output("call_2")]
    assert chat_messages("", [cut, output(), *whole]) == chat_messages("", whole)
    again = [call("completed"), output()]  # of another reply, whose calls have the same ids
    assert chat_messages("", [cut, *again]) == chat_messages("", again)
