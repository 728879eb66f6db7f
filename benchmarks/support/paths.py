"""Name the folders that benchmarks read and write."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"
RESULTS_FOLDER = ROOT / "benchmarks" / "results"
