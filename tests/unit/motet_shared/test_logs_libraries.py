"""What libraries with log handlers of their own may add to a service's log."""

import subprocess
import sys

import pytest

INSTALL = (
    "from motet_shared.process import config, logs;"
    " logs.install('r', 'i', config.ProcessConfig(log_level='{level}'))"
)
WARN = "from {library}.utils import logging; logging.get_logger('{library}.x').warning('beware')"


@pytest.mark.parametrize("library", ["transformers", "diffusers"])
@pytest.mark.parametrize("installed_first", [True, False])
def test_their_warnings_are_told_to_those_who_debug(library: str, installed_first: bool) -> None:
    for level, told in (("info", False), ("debug", True)):
        install, warn = INSTALL.format(level=level), WARN.format(library=library)
        lines = (
            [install, warn]
            if installed_first
            else [f"import {library}.utils.logging", install, warn]
        )
        done = subprocess.run(
            [sys.executable, "-c", "; ".join(lines)], capture_output=True, text=True, check=True
        )
        assert ("beware" in done.stderr) == told
