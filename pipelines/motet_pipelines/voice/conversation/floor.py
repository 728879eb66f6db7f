"""Track who speaks: the user's position in time, and when the reply will have been played."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class FloorState(msgspec.Struct, frozen=True):
    """Times of a `Floor` on which nothing is said."""

    position: float
    idle_from: float
    playing_until: float


@dataclass(slots=True)
class Floor:
    """State that turn detection and replies share. Times are in ms of the user's audio."""

    position: float = 0.0  # end of the audio that was received
    user_speaks: bool = False  # within a detected turn
    replying: bool = False  # a reply writes the conversation
    answering: bool = False  # a turn waits for its transcript before it is answered
    idle_from: float = 0.0
    playing_until: float = 0.0  # when the caller will have played the reply

    def state(self) -> FloorState:
        return FloorState(self.position, self.idle_from, self.playing_until)

    def restore(self, state: FloorState) -> None:
        self.position, self.idle_from = state.position, state.idle_from
        self.playing_until = state.playing_until

    @property
    def busy(self) -> bool:
        """Return True if a reply is being generated or is about to be."""
        return self.replying or self.answering

    def is_replying(self, ms: float) -> bool:
        """Return True if a reply was being generated or played at `ms`."""
        return self.replying or ms < self.playing_until

    def end_reply(self, playing_ms: float) -> None:
        """Count silence from the end of a reply, which is played for `playing_ms` more."""
        self.idle_from = self.position + playing_ms
        self.playing_until = self.idle_from if playing_ms else 0.0
