"""Record the measurements of one request, in seconds from the start of the run."""

from __future__ import annotations

from dataclasses import dataclass, field

from motet_cli.bench.speech import Heard

_STAGES = ("queue", "transfer", "prefill", "decode")  # of the engine, in this order


@dataclass(slots=True)
class Record:
    """Hold the measurements of one request and its reply.

        due: time at which it should be sent.
        sent: time at which it was sent.
        ended: time at which the reply was complete or had failed.
        times, events: times at which data with tokens was read, and the number of events in each read.
    tokens: completion tokens by the server's usage; None: not reported, so events count as tokens.
    timing: seconds by `<role>.<stage>`, if the server reports them.
        speech: what a listener has of a spoken reply.
        error: kind of failure; empty for a complete reply.
        message: the server's or the system's message.
    """

    number: int
    due: float
    max_tokens: int = 0
    sent: float = 0.0
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    tokens: int | None = None
    timing: dict[str, float] = field(default_factory=dict)
    speech: Heard | None = None
    error: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def output_tokens(self) -> int:
        """Return the completion tokens by the server's usage, else the events with tokens."""
        return sum(self.events) if self.tokens is None else self.tokens

    @property
    def ttft(self) -> float | None:
        """Return the seconds from sending to the first token; None without one."""
        return self.times[0] - self.sent if self.times else None

    @property
    def e2e(self) -> float:
        """Return the seconds from sending to the end of the reply."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Return the mean seconds per token after the first; None for fewer than two."""
        if len(self.times) == 0 or self.output_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Return the seconds between successive reads with tokens."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def token_gaps(self) -> list[float]:
        """Return the gaps per token: each gap divided among the tokens that arrived at its end.

        Usage counts the tokens of all events together, so every event counts for the same number.
        """
        carried = max(1.0, self.output_tokens / max(1, sum(self.events)))
        return [
            gap / (n * carried)
            for gap, n in zip(self.gaps, self.events[1:], strict=True)
            for _ in range(n)
        ]

    @property
    def plumbing(self) -> float | None:
        """Return the seconds of `e2e` outside the engine and its queue; None without `timing`."""
        if "decode.decode" not in self.timing:
            return None
        return self.e2e - sum(self.timing.get(f"decode.{stage}", 0.0) for stage in _STAGES)
