"""Plot a run: distributions of TTFT and ITL, and the tokens of each second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet_cli.bench.load import Measured
from motet_cli.bench.results.summary import Limits
from motet_shared.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")
# Seconds; a logarithmic axis cannot show gaps of 0, between events that arrived together.
_LOWEST = 1e-5


def check(path: str) -> Path:
    """Return the path. Raises ConfigError if the plot could not be written after the run."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--plot: matplotlib is not installed; pip install 'motet[bench]'", param="--plot"
        ) from None
    target = Path(path).expanduser()
    if target.suffix not in FORMATS or not target.parent.is_dir():
        raise ConfigError(
            f"--plot: {path!r}: give a name ending in {' or '.join(FORMATS)}, in a folder that exists",
            param="--plot",
        )
    return target


def draw(measured: Measured, limits: Limits, title: str, path: Path) -> None:
    """Write the plot to `path`, in the format of its suffix."""
    from matplotlib.figure import Figure

    done = [record for record in measured.records if record.ok]
    figure = Figure(figsize=(12, 4), layout="constrained")
    figure.suptitle(title)
    axes: Any = figure.subplots(1, 3)
    _distribution(
        axes[0], "TTFT", [record.ttft for record in done if record.ttft is not None], limits.ttft
    )
    _distribution(axes[1], "ITL", [gap for record in done for gap in record.gaps], limits.itl)
    _rate(axes[2], measured)
    figure.savefig(path)


def _distribution(axes: Axes, name: str, values: Sequence[float], limit: float | None) -> None:
    """Plot the cumulative distribution of values in seconds, with the goodput limit."""
    axes.set(title=name, xlabel="milliseconds", ylabel="share", ylim=(0, 1))
    axes.grid(alpha=0.3)
    if not values:
        return
    ordered = sorted(max(value, _LOWEST) * 1000 for value in values)
    axes.set_xscale("log")
    for formatted in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        formatted("{x:g}")
    axes.tick_params(axis="x", which="both", labelrotation=45)
    axes.step(ordered, [(rank + 1) / len(ordered) for rank in range(len(ordered))], where="post")
    if limit is not None:
        axes.axvline(limit * 1000, color="tab:red", linestyle="--", label="limit")
        axes.legend()


def _rate(axes: Axes, measured: Measured) -> None:
    """Plot the number of events with tokens in each second of the run."""
    counts: Counter[int] = Counter()
    for record in measured.records:
        for when, events in zip(record.times, record.events, strict=True):
            counts[int(when)] += events
    seconds = range(max(counts, default=0) + 1)
    axes.set(title="throughput", xlabel="second of the run", ylabel="tokens/s (events)")
    axes.grid(alpha=0.3)
    axes.step(seconds, [counts[second] for second in seconds], where="mid")
    axes.set_ylim(bottom=0)
