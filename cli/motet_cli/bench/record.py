"""What was measured of one request. All times are seconds on one clock, from the start of the run."""

from __future__ import annotations

from dataclasses import dataclass, field

_STAGES = ("queue", "transfer", "prefill", "decode")  # of decode, one after the other


@dataclass(slots=True)
class Record:
    """One request and its reply.

    due: when it should be sent; sent: when it was. ended: when the reply was complete, or had failed.
    times, events: when something was read that carried tokens, and how many events it was: events that come with one
        read arrived together.
    tokens: completion tokens by the server's usage; None: it told none, and events are taken for tokens.
    timing: seconds by `<role>.<stage>`, where the server tells them.
    error: kind of failure, empty for a complete reply; message: the server's or the system's words.
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
    error: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def output_tokens(self) -> int:
        return sum(self.events) if self.tokens is None else self.tokens

    @property
    def ttft(self) -> float | None:
        """From sending to the first token; None without one."""
        return self.times[0] - self.sent if self.times else None

    @property
    def e2e(self) -> float:
        """From sending to the end of the reply."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None for fewer than two."""
        if len(self.times) == 0 or self.output_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between successive arrivals: what a reader waits for."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def token_gaps(self) -> list[float]:
        """The gaps shared out among the tokens that ended them.

        Usage tells only how many tokens all events carried together, so each event counts for the same number.
        """
        carried = max(1.0, self.output_tokens / max(1, sum(self.events)))
        return [gap / (n * carried) for gap, n in zip(self.gaps, self.events[1:], strict=True) for _ in range(n)]

    @property
    def plumbing(self) -> float | None:
        """Of `e2e`, what was spent neither in the engine nor in its queue; None if the server tells no times."""
        if "decode.decode" not in self.timing:
            return None
        return self.e2e - sum(self.timing.get(f"decode.{stage}", 0.0) for stage in _STAGES)
