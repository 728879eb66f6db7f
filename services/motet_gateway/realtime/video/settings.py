"""Define `video`: which frames of the user's camera a session retains, an extension of OpenAI's API."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from motet_gateway.realtime.settings_base import StrictSettings
from motet_pipelines.voice.conversation.settings import VideoSettings

Pictures = Annotated[int, Meta(ge=1, le=32)]


class Window(StrictSettings, frozen=True, tag="window"):
    """Retain the newest frames."""

    frames: Pictures = 8

    @property
    def settings(self) -> VideoSettings:
        return VideoSettings(kind="window", frames=self.frames)


class Stride(StrictSettings, frozen=True, tag="stride"):
    """Retain the newest frame, and frames of the whole session at an even stride."""

    frames: Annotated[int, Meta(ge=2, le=32)] = 8

    @property
    def settings(self) -> VideoSettings:
        return VideoSettings(kind="stride", frames=self.frames)


class Merged(StrictSettings, frozen=True, tag="merged"):
    """Retain the newest frames, and earlier ones in groups with the tokens of one frame each."""

    frames: Pictures = 4
    groups: Annotated[int, Meta(ge=1, le=16)] = 4
    group_size: Annotated[int, Meta(ge=2, le=16)] = 4

    @property
    def settings(self) -> VideoSettings:
        return VideoSettings(
            kind="merged", frames=self.frames, groups=self.groups, group_size=self.group_size
        )


Video = Window | Stride | Merged
