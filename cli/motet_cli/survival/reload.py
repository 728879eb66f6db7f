"""Ask, before a reload, whether a new `motet up` would start with the settings of now.

A process of its own answers: the files of a newer release may be in place already, and it is these
that will read the settings.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence


async def refusal(flags: Sequence[str]) -> str:
    """Return why `motet up` with these flags would not start; "" if it would."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "motet_cli.survival.settings_check", *flags),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        return f"the settings cannot be checked: {error}"
    try:
        _, told = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return ""
    lines = told.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"the check of the settings ended with {process.returncode}"
