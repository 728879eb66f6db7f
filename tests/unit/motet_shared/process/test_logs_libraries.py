"""What libraries with log handlers of their own may add to a service's log."""

import subprocess
import sys

import pytest

LIBRARIES = ("transformers", "diffusers")
INSTALL = (
    "from motet_shared.process import config, logs;"
    " logs.install('r', 'i', config.ProcessConfig(log_level='{level}'))"
)
IMPORT = "import {library}.utils.logging"
WARN = (
    "from {library}.utils import logging;"
    " logging.get_logger('{library}.x').warning('{library} warns')"
)


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("level", "installed_first", "told"), [("info", True, False), ("debug", False, True)]
)
def test_their_warnings_are_told_to_those_who_debug(
    level: str, installed_first: bool, told: bool
) -> None:
    imports = [IMPORT.format(library=library) for library in LIBRARIES]
    warnings = [WARN.format(library=library) for library in LIBRARIES]
    install = INSTALL.format(level=level)
    lines = [install, *warnings] if installed_first else [*imports, install, *warnings]
    done = subprocess.run(
        [sys.executable, "-c", "; ".join(lines)], capture_output=True, text=True, check=True
    )
    for library in LIBRARIES:
        assert (f"{library} warns" in done.stderr) == told


def test_the_end_of_a_connection_under_tls_is_no_news() -> None:
    warn = (
        "import logging; log = logging.getLogger('asyncio');"
        " log.warning('returning true from eof_received() has no effect when using ssl');"
        " log.warning('a callback was slow')"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{INSTALL.format(level='info')}; {warn}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "eof_received" not in done.stderr
    assert "a callback was slow" in done.stderr
