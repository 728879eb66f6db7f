"""Print the summary of a run as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from motet_cli.bench.results.statistics import SHARES, Spread
from motet_cli.bench.results.summary import Goodput, Limits, SpeechSummary, Summary

_WIDTH = 100  # without a terminal
_STAGES = {
    "queue": "queue in the engine",
    "prefill": "prefill",
    "decode": "decode",
    "plumbing": "outside the engine (plumbing)",
    "model": "of it, forward passes",
}


def show(summary: Summary, title: str) -> None:
    """Print the summary to standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print(f"[bold]{escape(title)}[/bold]")
    console.print(_totals(summary))
    if summary.speech is not None:
        console.print(_speech_figures(summary, summary.speech))
    elif summary.completed:
        console.print(_latencies(summary))
    if summary.failures:
        console.print(_failures(summary))
    for warning in warnings(summary):
        console.print(f"[yellow]{warning}[/yellow]")


def _totals(summary: Summary) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _rows(summary):
        table.add_row(name, value)
    return table


def _rows(summary: Summary) -> Iterator[tuple[str, str]]:
    outcome = f"{summary.completed} of {summary.sent} completed in {summary.seconds:.1f} s"
    outcome += f", {summary.failed} failed" if summary.failed else ""
    yield "requests", outcome + (f", {summary.unfinished} unfinished" if summary.unfinished else "")
    if (speech := summary.speech) is not None:
        yield from _speech_rows(summary, speech)
        return
    yield (
        "throughput",
        f"{summary.requests_per_second:.2f} requests/s, {summary.output_tokens_per_second:.1f} tokens/s",
    )
    share = summary.cached_tokens / summary.input_tokens if summary.input_tokens else 0.0
    tokens = f"{summary.input_tokens:,} in ({share:.0%} cached), {summary.output_tokens:,} out"
    yield "tokens", tokens
    yield "goodput", _goodput_text(summary.goodput)
    if (cost := summary.cost) is not None and cost.per_million_output is not None:
        yield (
            "cost",
            f"{cost.per_million_output:,.2f} per million output tokens, {cost.per_million_total:,.2f} of all",
        )
    client = summary.client
    yield "client", f"{client.cpu_share:.0%} of a core, {client.cpu_us_per_event:.0f} µs per event"


def _speech_rows(summary: Summary, speech: SpeechSummary) -> Iterator[tuple[str, str]]:
    yield (
        "throughput",
        f"{summary.requests_per_second:.2f} requests/s,"
        f" {speech.audio_seconds_per_second:.2f} s of audio per second",
    )
    yield "audio", f"{speech.audio_seconds:,.1f} s"
    yield (
        "underruns",
        f"{speech.underruns}, {speech.stalled:.2f} s; continuity {speech.continuity:.2%}",
    )
    yield "goodput", _goodput_text(summary.goodput)
    yield "client", f"{summary.client.cpu_share:.0%} of a core"


def _goodput_text(goodput: Goodput) -> str:
    found = f"{goodput.requests_per_second:.2f} requests/s, {goodput.share:.1%} within {_limits_text(goodput.limits)}"
    return (
        found
        if any(vars(goodput.limits).values())
        else f"{goodput.requests_per_second:.2f} requests/s (no limits)"
    )


def _limits_text(limits: Limits) -> str:
    parts = {
        "TTFT": limits.ttft,
        "TTFA": limits.ttfa,
        "p95 ITL": limits.itl,
        "E2E": limits.e2e,
    }
    return ", ".join(
        f"{name} ≤ {duration(limit)}" for name, limit in parts.items() if limit is not None
    )


def _spreads(title: str) -> Table:
    """Return an empty table of distributions."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(title)
    for name in ("mean", *(f"p{share}" for share in SHARES), "max"):
        table.add_column(name, justify="right")
    return table


def _speech_figures(summary: Summary, speech: SpeechSummary) -> Table:
    table = _spreads("milliseconds")
    table.add_row("TTFA", *_milliseconds(speech.ttfa))
    table.add_row("E2E", *_milliseconds(summary.e2e))
    rtf = [speech.rtf.mean, *(getattr(speech.rtf, f"p{share}") for share in SHARES), speech.rtf.max]
    table.add_row("RTF, seconds per second", *(f"{value:.3f}" for value in rtf))
    return table


def _latencies(summary: Summary) -> Table:
    table = _spreads("milliseconds")
    rows = {
        "TTFT": summary.ttft,
        "ITL, between arrivals": summary.itl,
        "ITL, per token": summary.itl_per_token,
        "TPOT": summary.tpot,
        "E2E": summary.e2e,
    }
    rows |= {f"  {_STAGES[name]}": spread for name, spread in summary.stages.items()}
    for name, spread in rows.items():
        table.add_row(name, *_milliseconds(spread))
    return table


def _milliseconds(spread: Spread) -> list[str]:
    if not spread.count:
        return ["–"] * (len(SHARES) + 2)
    values = [spread.mean, *(getattr(spread, f"p{share}") for share in SHARES), spread.max]
    return [f"{value * 1000:,.1f}" for value in values]


def _failures(summary: Summary) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("failed", justify="right")
    table.add_column("kind")
    table.add_column("first message", overflow="fold")
    for failure in summary.failures:
        table.add_row(str(failure.count), escape(failure.kind), escape(failure.message))
    return table


def warnings(summary: Summary) -> list[str]:
    """Return warnings that limit how far the figures can be trusted."""
    found = []
    client = summary.client
    if client.bottleneck:
        found.append(
            f"warning: the client was a bottleneck: it used {client.cpu_share:.0%} of a core, its event loop"
            f" lagged {client.lag.p99 * 1000:.0f} ms and requests were sent"
            f" {client.late.p99 * 1000:.0f} ms late (p99); give it a core of its own, or less load"
        )
    if summary.counted == "events" and summary.completed and summary.speech is None:
        found.append(
            "note: the server reported no usage for some replies; their events are counted as tokens"
        )
    if summary.interrupted:
        found.append("note: interrupted; the figures cover the time until then")
    return found


def duration(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1000:g} ms"
