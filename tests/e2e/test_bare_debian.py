"""The README's two commands on a Debian that has nothing yet: native kernels, `ready`, and an answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from containers.bare import bare_debian
from containers.engine import missing
from e2e.readme import blocks
from e2e.stack import until
from motet_shared.testing import free_port

INSTALL_SECONDS = 1500
READY_SECONDS = 1800  # torch and all else is installed first


def said(log: Path) -> str:
    """Return what a log holds so far; its end may be a part of a character."""
    return log.read_text(errors="replace")


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.extended("conformance")
@pytest.mark.timeout(4200)
def test_two_commands_serve_with_native_kernels(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    install, run = (block.code.strip() for block in blocks()[:2])
    assert re.match(r"sudo apt-get update && sudo apt-get install", install)
    assert run == "make run"
    with bare_debian(tmp_path) as debian:
        debian.run(install.replace("sudo ", ""), INSTALL_SECONDS)
        debian.copy_project()
        port, log = free_port(), tmp_path / "log"
        process = debian.start(f"cd motet && exec {run} ARGS='--port {port}'", log)
        try:
            until(
                lambda: process.poll() is not None or "ready after" in said(log),
                "ready",
                READY_SECONDS,
            )
            assert process.poll() is None, said(log)[-4000:]
            chat = f"motet/.venv/bin/motet chat --url http://127.0.0.1:{port} 'There is a red circle. What do you see?'"
            assert "red circle" in debian.run(chat, 120)
            assert "kernels run on torch" not in said(log)
        finally:
            process.kill()
            process.wait(60)
