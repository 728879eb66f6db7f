"""Summarize a run: latencies, throughput, goodput, costs, and the client's own load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from motet_cli.bench.load import Measured
from motet_cli.bench.results.record import Record
from motet_cli.bench.results.statistics import Spread, percentile

_BUSY = 0.7  # share of one core above which the client delays what it measures
_LATE = 0.02  # seconds of lag or lateness above which the client is a bottleneck


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Hold the limits of a request that counts for goodput, in seconds; None: no limit.

    ttft: time to first token.
    ttfa: time to first audio, of spoken replies.
    itl: the 95th percentile of the gaps between arrivals within the request.
    e2e: the whole reply.
    """

    ttft: float | None = None
    ttfa: float | None = None
    itl: float | None = None
    e2e: float | None = None

    def met_by(self, record: Record) -> bool:
        """Return True if the reply is complete and within all limits."""
        if not record.ok:
            return False
        gaps = sorted(record.gaps)
        return (
            _within(record.e2e if record.ttft is None else record.ttft, self.ttft)
            and _within(record.e2e if record.speech is None else record.speech.ttfa, self.ttfa)
            and _within(percentile(gaps, 95) if gaps else 0.0, self.itl)
            and _within(record.e2e, self.e2e)
        )


def _within(value: float, limit: float | None) -> bool:
    return limit is None or value <= limit


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Count the failures of one kind.

    message: the message of the first one.
    """

    kind: str
    count: int
    message: str


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Count the requests within the limits.

    share: of all requests that were not interrupted, failed ones included.
    """

    limits: Limits
    requests: int
    share: float
    requests_per_second: float


@dataclass(frozen=True, kw_only=True)
class Cost:
    """State the cost per million tokens, in the unit of `price_per_hour`; None without tokens."""

    price_per_hour: float
    per_million_output: float | None
    per_million_total: float | None


@dataclass(frozen=True, kw_only=True)
class SpeechSummary:
    """Summarize spoken replies, as a listener has them.

    ttfa: seconds to the first audio. rtf: seconds of a reply per second of its audio.
    underruns: times that a player had nothing to play; stalled: seconds of them.
    continuity: share of the listening time in which audio was heard.
    """

    audio_seconds: float
    audio_seconds_per_second: float
    ttfa: Spread
    rtf: Spread
    underruns: int
    stalled: float
    continuity: float


@dataclass(frozen=True, kw_only=True)
class ClientLoad:
    """State the load of the client itself.

    lag: delay of its event loop, in seconds.
    late: seconds between a request's due time and its sending (open loop).
    bottleneck: True if the client slowed the measurement down.
    """

    cpu_share: float
    cpu_us_per_event: float
    lag: Spread
    late: Spread
    bottleneck: bool


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Hold the results of a run. Times are in seconds; latencies are of complete replies only.

    counted: "usage" if output tokens are the server's usage; "events" if it reported none for some
        replies.
    itl: between two reads with tokens.
    itl_per_token: the same, divided among the tokens of each read.
    stages: seconds of a reply by stage, as Motet reports them; empty for other servers.
    """

    seconds: float
    interrupted: bool
    sent: int
    completed: int
    failed: int
    unfinished: int
    failures: list[Failure]
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    counted: str
    requests_per_second: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    ttft: Spread
    itl: Spread
    itl_per_token: Spread
    tpot: Spread
    e2e: Spread
    stages: dict[str, Spread]
    speech: SpeechSummary | None
    goodput: Goodput
    cost: Cost | None
    client: ClientLoad


def summarize(
    measured: Measured, limits: Limits, price_per_hour: float | None = None, *, paced: bool
) -> Summary:
    """Return the summary of a run.

    paced: requests had arrival times, so that the client can send them late.
    """
    records = measured.records
    done = [record for record in records if record.ok]
    seconds = max(measured.seconds, 1e-9)
    inputs, outputs = sum(r.prompt_tokens or 0 for r in done), sum(r.output_tokens for r in done)
    unfinished = sum(record.error == "interrupted" for record in records)
    return Summary(
        seconds=measured.seconds,
        interrupted=measured.interrupted,
        sent=len(records),
        completed=len(done),
        failed=len(records) - len(done) - unfinished,
        unfinished=unfinished,
        failures=_failures(records),
        input_tokens=inputs,
        cached_tokens=sum(record.cached_tokens for record in done),
        output_tokens=outputs,
        counted="usage" if all(record.tokens is not None for record in done) else "events",
        requests_per_second=len(done) / seconds,
        input_tokens_per_second=inputs / seconds,
        output_tokens_per_second=outputs / seconds,
        ttft=_spread(done, lambda r: r.ttft),
        itl=Spread.of(gap for record in done for gap in record.gaps),
        itl_per_token=Spread.of(gap for record in done for gap in record.token_gaps),
        tpot=_spread(done, lambda r: r.tpot),
        e2e=_spread(done, lambda r: r.e2e),
        stages=_stages(done),
        speech=_speech(done, seconds),
        goodput=_goodput(records, limits, seconds),
        cost=None if price_per_hour is None else _cost(price_per_hour, seconds, inputs, outputs),
        client=_client(measured, seconds, paced),
    )


def _spread(records: Iterable[Record], value: Callable[[Record], float | None]) -> Spread:
    return Spread.of(found for record in records if (found := value(record)) is not None)


def _failures(records: list[Record]) -> list[Failure]:
    kinds: dict[str, list[str]] = {}
    for record in records:
        if not record.ok and record.error != "interrupted":
            kinds.setdefault(record.error, []).append(record.message)
    ordered = sorted(kinds.items(), key=lambda item: -len(item[1]))
    return [
        Failure(kind=kind, count=len(messages), message=messages[0]) for kind, messages in ordered
    ]


def _stages(done: list[Record]) -> dict[str, Spread]:
    """Return seconds in the engine's queue, prefill and decode, outside of it, and in its model."""
    known = [record for record in done if record.plumbing is not None]
    if not known:
        return {}
    stages = {
        name: Spread.of(r.timing.get(f"decode.{name}", 0.0) for r in known)
        for name in ("queue", "prefill")
    }
    stages["decode"] = Spread.of(r.timing["decode.decode"] for r in known)
    stages["plumbing"] = _spread(known, lambda r: r.plumbing)
    stages["model"] = Spread.of(r.timing.get("decode.model", 0.0) for r in known)
    return stages


def _speech(done: list[Record], seconds: float) -> SpeechSummary | None:
    heard = [record.speech for record in done if record.speech is not None]
    if not heard:
        return None
    audio, stalled = sum(one.audio for one in heard), sum(one.stalled for one in heard)
    return SpeechSummary(
        audio_seconds=audio,
        audio_seconds_per_second=audio / seconds,
        ttfa=Spread.of(one.ttfa for one in heard),
        rtf=Spread.of(one.rtf for one in heard),
        underruns=sum(one.underruns for one in heard),
        stalled=stalled,
        continuity=audio / (audio + stalled),
    )


def _goodput(records: list[Record], limits: Limits, seconds: float) -> Goodput:
    ended = [record for record in records if record.error != "interrupted"]
    good = sum(limits.met_by(record) for record in ended)
    return Goodput(
        limits=limits,
        requests=good,
        share=good / max(1, len(ended)),
        requests_per_second=good / seconds,
    )


def _cost(price: float, seconds: float, inputs: int, outputs: int) -> Cost:
    spent = price * seconds / 3600
    return Cost(
        price_per_hour=price,
        per_million_output=spent / outputs * 1e6 if outputs else None,
        per_million_total=spent / (inputs + outputs) * 1e6 if inputs + outputs else None,
    )


def _client(measured: Measured, seconds: float, paced: bool) -> ClientLoad:
    events = sum(sum(record.events) for record in measured.records)
    share, lag = measured.cpu_seconds / seconds, Spread.of(measured.lags)
    late = Spread.of(record.sent - record.due for record in measured.records if paced)
    return ClientLoad(
        cpu_share=share,
        cpu_us_per_event=measured.cpu_seconds / events * 1e6 if events else 0.0,
        lag=lag,
        late=late,
        bottleneck=share > _BUSY or lag.p99 > _LATE or late.p99 > _LATE,
    )
