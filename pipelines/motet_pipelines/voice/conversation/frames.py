"""Keep what a model sees of a user's camera: the frames that a policy retains, bounded in memory.

The frames are no items: each reply gets those that are retained when it begins, in front of the
user's last message, so the earlier turns of its prompt stay as they are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from motet_pipelines.answers import noted
from motet_pipelines.chat.vision import InputMedia
from motet_shared.errors import BadRequest

from .settings import VideoSettings

FRAMES = "frames"  # key of a chat message's picture that is made of frames
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Frame:
    """A picture file of a camera, and the pixels that it is scaled down to (0: the model's most)."""

    data: bytes
    max_pixels: int = 0


Picture = tuple[Frame, ...]  # of one prompt: a frame, or several that are merged, oldest first


class FramesState(msgspec.Struct, frozen=True):
    """Frames that were added so far, the pictures that are retained, and the `counts` of their policy."""

    added: int
    pictures: list[Picture]
    counts: list[int]


class FramePolicy(Protocol):
    """Decide which frames are retained."""

    def add(self, frame: Frame) -> None:
        """Add the newest frame."""

    def drop_oldest(self) -> None:
        """Drop the oldest frame, unless there is no other one."""

    def pictures(self) -> list[Picture]:
        """Return the pictures of a prompt, oldest first."""

    def counts(self) -> list[int]:
        """Return what `restore` needs besides the pictures."""

    def restore(self, pictures: list[Picture], counts: list[int]) -> None:
        """Retain, in place of nothing, what another policy of the same settings has retained."""


class WindowPolicy:
    """Retain the newest `frames`."""

    def __init__(self, frames: int):
        self._kept: deque[Frame] = deque(maxlen=frames)

    def add(self, frame: Frame) -> None:
        self._kept.append(frame)

    def drop_oldest(self) -> None:
        if len(self._kept) > 1:
            self._kept.popleft()

    def pictures(self) -> list[Picture]:
        return [(frame,) for frame in self._kept]

    def counts(self) -> list[int]:
        return []

    def restore(self, pictures: list[Picture], counts: list[int]) -> None:
        self._kept.extend(frame for picture in pictures for frame in picture)


class StridePolicy:
    """Retain the newest frame and, of all before it, up to `frames` - 1 at an even stride.

    Whenever they are more, every second one is dropped and the stride doubles.
    """

    def __init__(self, frames: int):
        self._most, self._stride, self._next = frames - 1, 1, 0
        self._even: list[tuple[int, Frame]] = []  # with their numbers, multiples of the stride
        self._newest: Frame | None = None

    def add(self, frame: Frame) -> None:
        number, self._next = self._next - 1, self._next + 1
        if self._newest is not None and number % self._stride == 0:
            self._even.append((number, self._newest))
        while len(self._even) > self._most:
            self._stride *= 2
            self._even = [kept for kept in self._even if kept[0] % self._stride == 0]
        self._newest = frame

    def drop_oldest(self) -> None:
        if self._even:
            self._even.pop(0)

    def pictures(self) -> list[Picture]:
        newest = [] if self._newest is None else [self._newest]
        return [(frame,) for frame in (*(frame for _, frame in self._even), *newest)]

    def counts(self) -> list[int]:
        return [self._stride, self._next, *(number for number, _ in self._even)]

    def restore(self, pictures: list[Picture], counts: list[int]) -> None:
        self._stride, self._next, *numbers = counts
        frames = [frame for (frame,) in pictures]
        self._even = list(zip(numbers, frames, strict=False))
        self._newest = frames[-1] if frames else None


class MergedPolicy:
    """Retain the newest `frames`, and before them up to `groups` of `group_size` merged frames.

    A group is one picture of a prompt: the embeddings of its frames are averaged, so that it has
    the tokens of one frame.
    """

    def __init__(self, frames: int, groups: int, group_size: int):
        self._recent: deque[Frame] = deque()
        self._groups: deque[list[Frame]] = deque()
        self._frames, self._most, self._size = frames, groups, group_size

    def add(self, frame: Frame) -> None:
        self._recent.append(frame)
        if len(self._recent) <= self._frames:
            return
        if not self._groups or len(self._groups[-1]) == self._size:
            self._groups.append([])
        self._groups[-1].append(self._recent.popleft())
        if len(self._groups) > self._most:
            self._groups.popleft()

    def drop_oldest(self) -> None:
        if self._groups:
            self._groups[0].pop(0)
            if not self._groups[0]:
                self._groups.popleft()
        elif len(self._recent) > 1:
            self._recent.popleft()

    def pictures(self) -> list[Picture]:
        return [*map(tuple, self._groups), *((frame,) for frame in self._recent)]

    def counts(self) -> list[int]:
        return [len(self._groups)]

    def restore(self, pictures: list[Picture], counts: list[int]) -> None:
        (groups,) = counts
        self._groups.extend(map(list, pictures[:groups]))
        self._recent.extend(frame for (frame,) in pictures[groups:])


class Frames:
    """Retain the frames of a conversation by a policy, at most `max_bytes` together."""

    def __init__(self, settings: VideoSettings | None, max_bytes: int):
        self._settings, self._max_bytes = settings, max_bytes
        self._policy = None if settings is None else _policy(settings)
        self.added = 0  # frames since the conversation began
        self._awaited: list[tuple[int, asyncio.Future[list[Picture]]]] = []

    @property
    def is_quiet(self) -> bool:
        """Return True if nothing waits for a frame."""
        return not self._awaited

    def state(self) -> FramesState:
        counts = [] if self._policy is None else self._policy.counts()
        return FramesState(self.added, self.pictures(), counts)

    def restore(self, state: FramesState) -> None:
        self.added = state.added
        if self._policy is not None:
            self._policy.restore(state.pictures, state.counts)

    def configure(self, settings: VideoSettings | None) -> None:
        """Replace the policy; the new one gets the frames that are retained, oldest first."""
        if settings == self._settings:
            return
        kept = [frame for picture in self.pictures() for frame in picture]
        self._settings, self._policy = settings, None if settings is None else _policy(settings)
        for frame in kept:
            self._retain(frame)

    def add(self, frame: Frame) -> None:
        """Add the newest frame. Raises BadRequest without settings."""
        if self._policy is None:
            raise BadRequest(
                "frames need a policy of which are kept; set `session.video` first",
                param="session.video",
            )
        self._retain(frame)
        self.added += 1
        for number, future in self._awaited:
            if number <= self.added and not future.done():
                future.set_result(self.pictures())
        self._awaited = [one for one in self._awaited if not one[1].done()]

    def _retain(self, frame: Frame) -> None:
        """Add a frame; while all have too many bytes, the oldest one goes."""
        if self._policy is None:
            return
        self._policy.add(frame)
        while self.count > 1 and self.bytes > self._max_bytes:
            self._policy.drop_oldest()

    def pictures(self) -> list[Picture]:
        """Return the pictures of a prompt, oldest first."""
        return [] if self._policy is None else self._policy.pictures()

    def as_of_now(self, name: str) -> asyncio.Future[list[Picture]] | None:
        """Return the pictures of a prompt that begins now; None where no frames are retained.

        name: under which it is noted which frame is the newest one. A process that does again what
        another one has done waits for that frame: there it may come later than the prompt.
        """
        if self._policy is None:
            return None
        number = noted(name, self.added)
        future = asyncio.get_running_loop().create_future()
        if number <= self.added:
            future.set_result(self.pictures())
        else:
            self._awaited.append((number, future))
        return future

    @property
    def count(self) -> int:
        """Return how many frames are retained."""
        return sum(map(len, self.pictures()))

    @property
    def bytes(self) -> int:
        """Return the bytes of the files that are retained."""
        return sum(len(frame.data) for picture in self.pictures() for frame in picture)


def _policy(settings: VideoSettings) -> FramePolicy:
    if settings.kind == "stride":
        return StridePolicy(settings.frames)
    if settings.kind == "merged":
        return MergedPolicy(settings.frames, settings.groups, settings.group_size)
    return WindowPolicy(settings.frames)


def with_pictures(messages: list[Message], pictures: Sequence[Picture]) -> list[Message]:
    """Return chat messages with the pictures in front of what the user said last.

    The newest picture begins that message, as a model reads a question about it. The others are a
    message of their own before it. Without a message of the user, the pictures are the last one.
    """
    if not pictures:
        return messages
    parts = [{"type": "image", FRAMES: picture} for picture in pictures]
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    place = users[-1] if users else len(messages)
    said = messages[place]["content"] if users else []
    if isinstance(said, str):
        said = [{"type": "text", "text": said}]
    newest = {"role": "user", "content": [parts[-1], *said]}
    earlier = [{"role": "user", "content": parts[:-1]}] if parts[1:] else []
    return [*messages[:place], *earlier, newest, *messages[place + 1 :]]


def is_turn(message: Message) -> bool:
    """Return True if the user said something in a message, rather than showed frames alone."""
    content = message["content"]
    return message["role"] == "user" and not (
        isinstance(content, list) and all(FRAMES in part for part in content)
    )


def media_of_frames(part: dict[str, Any]) -> InputMedia:
    """Return the picture of a chat message's part, for the encoder service."""
    *earlier, newest = part[FRAMES]
    return InputMedia(
        newest.data,
        newest.max_pixels,
        "conversation",
        merged=tuple(frame.data for frame in earlier),
    )
