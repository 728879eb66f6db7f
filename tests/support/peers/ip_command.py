"""Run `ip` of iproute2."""

from __future__ import annotations

import subprocess


def ip(*words: str) -> None:
    """Run `ip` of iproute2. Raises OSError if it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
