"""The dashboard for Grafana is what the code makes."""

from __future__ import annotations

import json

import render_dashboard


def test_the_dashboard_is_what_is_made() -> None:
    assert json.loads(render_dashboard.OUTPUT.read_text()) == render_dashboard.dashboard()
