"""Write the Grafana dashboard `observability/grafana/motet.json`.

`python deploy/render_dashboard.py`. Panels are defined by row; their grid positions and Grafana's
other members are computed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

OUTPUT = Path(__file__).parent / "observability" / "grafana" / "motet.json"
WIDTH, HEIGHT = 8, 7  # of a panel, on a grid of 24 columns


class Panel(NamedTuple):
    """Define a panel.

    series: PromQL expression and legend of each line.
    """

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]


def _stage(stage: str, share: float) -> str:
    rate = f'sum by (le) (rate(motet_stage_seconds_bucket{{stage="{stage}"}}[1m]))'
    return f"histogram_quantile({share}, {rate})"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Clients": (
        Panel(
            "Time to first token",
            "s",
            tuple(
                (_stage("gateway.first", share), name)
                for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
            ),
        ),
        Panel(
            "Mean time per stage",
            "s",
            (
                (
                    "sum by (stage) (rate(motet_stage_seconds_sum[1m]))"
                    " / sum by (stage) (rate(motet_stage_seconds_count[1m]))",
                    "{{stage}}",
                ),
            ),
        ),
        Panel(
            "Replies",
            "ops",
            (("sum by (status) (rate(motet_finished_replies_total[1m]))", "{{status}}"),),
        ),
        Panel(
            "Requests",
            "reqps",
            (
                (
                    "sum by (path, status) (rate(motet_http_requests_total[1m]))",
                    "{{path}} {{status}}",
                ),
            ),
        ),
        Panel(
            "Tokens sent",
            "short",
            (("sum by (model) (rate(motet_completion_tokens_total[1m]))", "{{model}}"),),
        ),
        Panel(
            "Open streams and sessions",
            "short",
            (
                ("sum(motet_active_streams)", "replies"),
                ("sum(motet_active_sockets)", "realtime sessions"),
            ),
        ),
    ),
    "Engine": (
        Panel(
            "Tokens computed", "short", (('rate(motet_tokens{role="decode"}[1m])', "{{instance}}"),)
        ),
        Panel("Batch size", "short", (('motet_batch_size{role="decode"}', "{{instance}}"),)),
        Panel(
            "Waiting and running sequences",
            "short",
            (
                ('motet_waiting{role="decode"}', "waiting {{instance}}"),
                ('motet_running{role="decode"}', "running {{instance}}"),
            ),
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            (("1 - motet_blocks_free / motet_blocks_total", "{{instance}}"),),
        ),
        Panel(
            "Prompt tokens from the prefix cache",
            "short",
            (("rate(motet_cached_tokens[1m])", "{{instance}}"),),
        ),
        Panel(
            "Preemptions and failovers",
            "short",
            (
                ("rate(motet_preemptions[1m])", "preemptions {{instance}}"),
                ("rate(motet_failovers[1m])", "failovers {{instance}}"),
            ),
        ),
    ),
    "Speech": (
        Panel(
            "First audio, 95 %",
            "s",
            (
                (
                    "histogram_quantile(0.95, sum by (le, model)"
                    " (rate(motet_speech_first_audio_seconds_bucket[1m])))",
                    "{{model}}",
                ),
            ),
        ),
        Panel(
            "Real-time factor",
            "short",
            (
                (
                    "sum by (model) (rate(motet_speech_realtime_factor_sum[1m]))"
                    " / sum by (model) (rate(motet_speech_realtime_factor_count[1m]))",
                    "{{model}}",
                ),
            ),
        ),
        Panel(
            "Underruns, and continuity",
            "short",
            (
                ("sum by (model) (rate(motet_speech_underruns_total[1m]))", "underruns {{model}}"),
                (
                    "sum by (model) (rate(motet_speech_audio_seconds_total[1m]))"
                    " / sum by (model) (rate(motet_speech_audio_seconds_total[1m])"
                    " + rate(motet_speech_stalled_seconds_total[1m]))",
                    "continuity {{model}}",
                ),
            ),
        ),
    ),
    "Processes": (
        Panel("Requests in progress", "short", (("motet_active", "{{instance}}"),)),
        Panel("Event loop lag", "s", (("motet_loop_lag_seconds", "{{instance}}"),)),
        Panel("Memory", "bytes", (("process_resident_memory_bytes", "{{instance}}"),)),
        Panel("CPU", "short", (("rate(process_cpu_seconds_total[1m])", "{{instance}}"),)),
        Panel("Messages sent", "short", (("rate(motet_messages_out[1m])", "{{instance}}"),)),
        Panel("Failed requests", "short", (("rate(motet_errors[1m])", "{{instance}}"),)),
    ),
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row, members in ROWS.items():
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": row, "gridPos": place, "panels": []}
        )
        top += 1
        for number, panel in enumerate(members):
            x, y = number % (24 // WIDTH) * WIDTH, top + number // (24 // WIDTH) * HEIGHT
            panels.append(_panel(panel, len(panels) + 1, x, y))
        top += -(-len(members) // (24 // WIDTH)) * HEIGHT
    return {
        "uid": "motet",
        "title": "Motet",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "prometheus"}
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": source,
            "expr": expression,
            "legendFormat": name,
        }
        for index, (expression, name) in enumerate(panel.series)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


if __name__ == "__main__":
    OUTPUT.write_text(json.dumps(dashboard(), indent=1) + "\n")
