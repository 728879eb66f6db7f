"""Test the benchmark of images, and run it on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine.llm import transformers_dtype
from benchmarks.images import images
from benchmarks.images.diffusion import (
    FULL,
    OURS,
    SERIAL,
    DiffusionFindings,
    DiffusionPlan,
    Load,
    Pairs,
    Served,
    diffusion_report,
    diffusion_targets,
)
from benchmarks.images.diffusion_worker import PictureTimes, _figures, _poisson
from benchmarks.images.encoder import (
    EncoderFindings,
    EncoderResult,
    encoder_report,
    encoder_targets,
)
from benchmarks.images.encoder_limit import limits
from benchmarks.images.step_cache import arguments, measure


def served(rate: float, latency: float) -> Served:
    return Served(rate, rate, latency, latency, 0.2)


def test_encoders_are_judged_against_transformers_one_by_one() -> None:
    seconds = {
        "motet float32": [1.0] * 6,
        "motet int8": [0.5] * 6,
        "transformers, one by one": [1.2] * 6,
    }
    encoder = EncoderResult("siglip", seconds, dict.fromkeys(seconds, 0.0), [196] * 8, 0.1)
    found = EncoderFindings([encoder])
    assert [(target.value, target.met) for target in encoder_targets(found)] == [
        (pytest.approx(1.2), False),
        (pytest.approx(2.4), True),
    ]
    assert "| siglip | motet int8 | 16.00 | 2.40 | 2.40–2.40 | 0.0e+00 |" in encoder_report(found)


def test_loads_are_judged_by_their_targets() -> None:
    load = Load(
        16,
        8,
        2.0,
        [0.0],
        {OURS: served(1.7, 2.0), SERIAL: served(1.0, 9.0), FULL: served(1.6, 3.0)},
    )
    pairs = Pairs(16, [1.02] * 24, [1.0] * 24, [0.3] * 24)
    found = DiffusionFindings("model", [pairs], [load])
    assert [(target.what, target.met) for target in diffusion_targets(found)] == [
        ("one picture, 16²: ours / diffusers, low end of interval", True),
        ("one picture, 16²: first preview", False),
        ("8 in flight, 16²: motet / one after the other", True),
        ("8 in flight, 16²: median latency, motet / full batches", True),
    ]
    assert (
        "| 16², ours can do 120.0/min | motet | 8 | 102.0 | 102.0 | 2.00 | 2.00 | 20% |"
        in diffusion_report(found, DiffusionPlan())
    )


def test_busy_throughput_counts_busy_time() -> None:
    times = [PictureTimes(0.0, 0.5, 1.0), PictureTimes(3.0, 3.5, 4.0), PictureTimes(3.5, 4.0, 5.0)]
    figures = _figures(times)
    assert figures["throughput"] == pytest.approx(3 / 5)
    assert figures["busy_throughput"] == pytest.approx(3 / 3)
    assert figures["latency"] == pytest.approx(1.0)
    assert figures["worst"] == pytest.approx(1.5)


def test_arrivals_depend_on_the_seed() -> None:
    first = _poisson(4.0, 400, 0)
    assert first == _poisson(4.0, 400, 0) != _poisson(4.0, 400, 1)
    assert first[0] == 0.0
    assert 80 < first[-1] < 125  # 100 s are expected


@pytest.mark.extended("families")
@pytest.mark.timeout(
    400
)  # two processes that import torch and a model class, maybe beside other tests
def test_encoders_and_pipelines_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "images.json"
    folders = ["--cache", str(tmp_path), "--output", str(output)]
    images.main(["--quick", "--threads", "1", "--shapes", "qwen2.5-vl-least", *folders])
    found, dtype = json.loads(output.read_text())["findings"], transformers_dtype("auto")
    for encoder in found["encoder"]["encoders"]:
        assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in encoder["seconds"].values())
        assert encoder["apart"][f"motet {dtype}"] < (1e-4 if dtype == "float32" else 0.1)
        assert encoder["apart"]["motet int8"] < 0.1
    (pairs,) = found["diffusion"]["pairs"]
    assert len(pairs["ours"]) == len(pairs["theirs"]) == 2
    assert all(0 < previewed < 1 for previewed in pairs["preview"])
    one, two = found["diffusion"]["loads"]
    assert list(one["served"]) == [OURS, SERIAL]
    assert list(two["served"]) == [OURS, SERIAL, FULL]
    assert "Load average" in capsys.readouterr().out


@pytest.mark.long
def test_the_products_of_a_tower_are_measured_beside_it(tmp_path: Path) -> None:
    found = limits("siglip-least", tmp_path, rounds=1)
    assert found.keys() == {
        "transformers, one by one",
        "motet",
        "products alone, torch",
        "products alone, packed",
    }
    assert all(seconds > 0 for seconds in found.values())


@pytest.mark.long
def test_the_step_cache_is_measured_beside_none() -> None:
    asked = ("--pictures", "2", "--steps", "4", "--thresholds", "0.1", "0.9", "--threads", "1")
    lines = measure(arguments(asked)).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:5]]
    assert [row[0] for row in rows] == ["off", "0.1", "0.9"]
    assert rows[0][2:] == ["1.00x", "0%", "0.00"]
    assert rows[2][3] != "0%"
    assert float(rows[2][4]) > 0
    assert "pocket-draw, 2 pictures of 4 steps, 1 threads" in lines[-1]
