"""Stop sending requests to an engine after failures in a row, and pace the trials that follow."""

from __future__ import annotations

from dataclasses import dataclass, field

_LONGEST = 60.0  # seconds between two trials


@dataclass(slots=True)
class Breaker:
    """Count failures in a row; open after `failures` of them, and close after a trial succeeds.

    pause: seconds until the first trial; it doubles with every trial that fails. failures: 0 never
    opens.
    """

    failures: int
    pause: float
    is_open: bool = False
    opened: int = 0  # times, since the start
    _in_a_row: int = field(default=0, repr=False)
    _pause: float = field(default=0.0, repr=False)

    def replied(self) -> None:
        """Note a request that has got a token: failures before it count no more.

        It leaves an open breaker to the trials, as it may have begun before the engine failed.
        """
        if not self.is_open:
            self._in_a_row = 0

    def succeeded(self) -> None:
        """Note a trial that has got a token."""
        self._in_a_row, self._pause, self.is_open = 0, 0.0, False

    def failed(self) -> bool:
        """Note a failure; return True if it opens the breaker."""
        self._in_a_row += 1
        if self.is_open or not self.failures or self._in_a_row < self.failures:
            return False
        self.is_open = True
        self.opened += 1
        return True

    def next_pause(self) -> float:
        """Return the seconds until the next trial."""
        self._pause = min(_LONGEST, self._pause * 2) if self._pause else self.pause
        return self._pause
