"""Test the page of all targets, and the comparison of a new run with the kept targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import check, sitting, summary
from benchmarks.support.document import conditions, processor, write
from benchmarks.support.measures import Target


def _result(folder: Path, name: str, *targets: Target) -> Path:
    path = folder / f"{name}.json"
    write(path, conditions(), {"rounds": 3}, {"times": [1.0] * 100}, targets)
    return path


def test_conditions_name_the_processor_and_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor : 0\nmodel name\t: A 64-Core\nflags\t\t: fpu avx2 avx512f ht\n\n" * 2
    )
    assert processor(info) == "A 64-Core avx2, avx512f"
    assert len(str(conditions()["commit"]).rstrip("+")) in (0, 8)
    assert conditions()["processor"]
    words = ["/somewhere/llm.py", "--rounds", "1", "--output", "/else/where.json", "--quick"]
    monkeypatch.setattr("sys.argv", words)
    assert conditions()["command"] == "llm.py --rounds 1 --quick"


def test_a_taken_result_is_on_the_page_without_its_findings(tmp_path: Path) -> None:
    result = _result(
        tmp_path, "pauses", Target("p99", 12.5, 10, "ms"), Target("rate", 4, 3, "times", most=False)
    )
    kept_at = summary.take(result, tmp_path / "targets")
    assert set(json.loads(kept_at.read_text())) == {"conditions", "targets"}
    page = summary.page(summary.all_kept(tmp_path / "targets"))
    assert "2 targets of 1 benchmarks, 1 of them missed" in page
    assert "| p99 | **no** | ≤ 10 ms | 12.50 |" in page
    assert "| rate | yes | ≥ 3 times | 4.00 |" in page


def test_a_file_without_targets_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in ("", "[]", '{"conditions": {}, "findings": []}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"other\.json"):
            summary.take(path, tmp_path / "targets")
    assert not (tmp_path / "targets").exists()


def test_the_page_is_the_one_of_the_kept_targets() -> None:
    assert summary.PAGE.read_text(encoding="utf-8") == summary.page(summary.all_kept())


def test_a_ratio_that_fell_is_worse_and_a_time_is_only_shown() -> None:
    before = summary.Kept(
        "x",
        {},
        [
            Target("gain", 2.0, 1.5, "times", most=False),
            Target("cost", 1.0, 1.1, "times"),
            Target("pause", 10, 20, "ms"),
            Target("gone", 1.0, 1.0, "times"),
        ],
    )
    now = summary.Kept(
        "x",
        {},
        [
            Target("gain", 1.7, 1.5, "times", most=False),
            Target("cost", 1.05, 1.1, "times"),
            Target("pause", 100, 20, "ms"),
        ],
    )
    gain, cost, pause = check.compared(before, now)
    assert gain.change == pytest.approx(-0.15)
    assert gain.is_worse(0.1)
    assert not gain.is_worse(0.2)
    assert cost.change == pytest.approx(-0.05)
    assert not cost.is_worse(0.1)
    assert not pause.is_worse(0.1)


def test_every_check_is_a_benchmark_with_these_arguments() -> None:
    for name, arguments in check.CHECKS.items():
        (path,) = summary.RESULTS_FOLDER.parent.glob(f"*/{name}.py")
        text = path.read_text(encoding="utf-8")
        support = (path.parents[1] / "engine" / "checkpoint.py").read_text(encoding="utf-8")
        for option in arguments[::1]:
            if option.startswith("--"):
                assert f'"{option}"' in text + support


def test_a_check_without_kept_targets_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "TARGETS_FOLDER", tmp_path)
    assert check.main(["codes"]) == 0
    assert "codes: nothing was kept" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        check.main(["unknown"])


def test_a_sitting_keeps_the_targets_of_each_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of them fails, and the other one is kept all the same."""
    monkeypatch.setattr(sitting, "BENCHMARKS", {"nothing": (), "adapters": ("--quick",)})
    kept_at: list[Path] = []
    monkeypatch.setattr(sitting, "take", kept_at.append)
    monkeypatch.setattr(sitting, "write_page", lambda: None)
    assert sitting.main(["--folder", str(tmp_path)]) == 1
    assert kept_at == [tmp_path / "adapters.json"]
    printed = capsys.readouterr().out
    assert "nothing … failed" in printed
    assert "## [adapters]" in printed
