"""Which frames of a camera a conversation retains, and where they stand in a prompt."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_pipelines.voice.conversation.frames import (
    FRAMES,
    Frame,
    Frames,
    is_turn,
    media_of_frames,
    with_pictures,
)
from motet_pipelines.voice.conversation.settings import VideoSettings
from motet_shared.errors import BadRequest

WINDOW = VideoSettings(kind="window", frames=3)
STRIDE = VideoSettings(kind="stride", frames=4)
MERGED = VideoSettings(kind="merged", frames=2, groups=2, group_size=3)
SETTINGS = st.one_of(
    st.builds(VideoSettings, kind=st.just("window"), frames=st.integers(1, 6)),
    st.builds(VideoSettings, kind=st.just("stride"), frames=st.integers(2, 6)),
    st.builds(
        VideoSettings,
        kind=st.just("merged"),
        frames=st.integers(1, 4),
        groups=st.integers(1, 4),
        group_size=st.integers(2, 4),
    ),
)


def frame(number: int) -> Frame:
    return Frame(b"%06d" % number)


def shown(frames: Frames) -> list[list[int]]:
    return [[int(one.data) for one in picture] for picture in frames.pictures()]


def after(settings: VideoSettings, count: int, max_bytes: int = 1 << 20) -> list[list[int]]:
    frames = Frames(settings, max_bytes)
    for number in range(count):
        frames.add(frame(number))
    return shown(frames)


@pytest.mark.parametrize(
    ("settings", "count", "expected"),
    [
        (WINDOW, 2, [[0], [1]]),
        (WINDOW, 30, [[27], [28], [29]]),
        (STRIDE, 6, [[0], [2], [4], [5]]),
        (STRIDE, 30, [[0], [16], [29]]),
        (MERGED, 3, [[0], [1], [2]]),
        (MERGED, 11, [[3, 4, 5], [6, 7, 8], [9], [10]]),
    ],
)
def test_what_each_policy_retains(
    settings: VideoSettings, count: int, expected: list[list[int]]
) -> None:
    assert after(settings, count) == expected


@given(SETTINGS, st.integers(1, 300))
def test_pictures_are_bounded_and_in_order(settings: VideoSettings, count: int) -> None:
    pictures = after(settings, count)
    numbers = [number for picture in pictures for number in picture]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == count - 1, "the newest one is there"
    assert len(pictures) <= settings.frames + settings.groups
    assert len(numbers) <= settings.frames + settings.groups * settings.group_size


@given(SETTINGS, st.integers(1, 100), st.integers(6, 60))
def test_bytes_are_bounded(settings: VideoSettings, count: int, most: int) -> None:
    frames = Frames(settings, most)
    for number in range(count):
        frames.add(frame(number))
        assert frames.bytes <= most
    assert shown(frames)[-1][-1] == count - 1


def test_one_frame_stays_whatever_its_size() -> None:
    assert after(WINDOW, 3, max_bytes=1) == [[2]]


def test_another_policy_takes_over_what_is_retained() -> None:
    frames = Frames(WINDOW, 1 << 20)
    for number in range(5):
        frames.add(frame(number))
    frames.configure(VideoSettings(kind="window", frames=2))
    assert shown(frames) == [[3], [4]]
    frames.configure(None)
    assert shown(frames) == []
    with pytest.raises(BadRequest) as caught:
        frames.add(frame(5))
    assert caught.value.param == "session.video"


async def test_a_prompt_has_the_frames_of_its_beginning() -> None:
    frames = Frames(WINDOW, 1 << 20)
    frames.add(frame(0))
    seen = frames.as_of_now("a")
    frames.add(frame(1))
    assert seen is not None
    assert await seen == [(frame(0),)]
    assert Frames(None, 1).as_of_now("a") is None


async def test_a_prompt_waits_for_the_frame_that_another_process_has_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("motet_pipelines.voice.conversation.frames.noted", lambda name, value: 2)
    frames = Frames(WINDOW, 1 << 20)
    frames.add(frame(0))
    seen = frames.as_of_now("a")
    assert seen is not None
    assert not seen.done()
    frames.add(frame(1))
    frames.add(frame(2))
    assert await asyncio.wait_for(seen, 1) == [(frame(0),), (frame(1),)]


def roles(messages: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    def part(one: dict[str, Any]) -> Any:
        return [int(f.data) for f in one[FRAMES]] if FRAMES in one else one["text"]

    return [
        (message["role"], list(map(part, message["content"])))
        if isinstance(message["content"], list)
        else (message["role"], message["content"])
        for message in messages
    ]


def test_the_newest_picture_begins_the_last_message_of_the_user() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]
    pictures = [(frame(1), frame(2)), (frame(3),), (frame(4),)]
    found = with_pictures(messages, pictures)
    assert roles(found) == [
        ("system", "Look."),
        ("user", "first"),
        ("assistant", "yes"),
        ("user", [[1, 2], [3]]),
        ("user", [[4], "second"]),
        ("assistant", ""),
    ]
    assert [is_turn(message) for message in found] == [False, True, False, False, True, False]
    assert with_pictures(messages, []) == messages
    assert roles(with_pictures(messages[:1], pictures[2:])) == [
        ("system", "Look."),
        ("user", [[4]]),
    ]
    medium = media_of_frames(found[3]["content"][0])
    assert (medium.data, medium.merged) == (frame(2).data, (frame(1).data,))
