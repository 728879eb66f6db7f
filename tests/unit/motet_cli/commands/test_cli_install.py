"""Test the version of `motet`, and its reports about incomplete installations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from motet_cli.main import main
from motet_cli.supervision.up import kernels_note
from motet_kernels.runtime import native
from motet_shared import __version__
from motet_shared.errors import ConfigError


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"motet {__version__}\n"


def test_a_missing_package_is_reported_with_its_extra() -> None:
    code = "import sys; sys.modules['httpx'] = None; from motet_cli.main import main; sys.exit(main(['models']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "'httpx'" in done.stderr
    assert "motet[all]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_start_that_compiles_kernels_logs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path))
    monkeypatch.setenv("MOTET_NATIVE", "scalar")
    assert native.will_build()
    assert kernels_note().endswith("scalar")
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler is there
    monkeypatch.delenv("CXX", raising=False)
    assert not native.will_build()
    monkeypatch.setenv("MOTET_NATIVE", "off")
    assert kernels_note() == ""


def test_an_unknown_instruction_set_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_NATIVE", "mmx")
    with pytest.raises(ConfigError):
        kernels_note()
