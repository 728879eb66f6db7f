"""Define rules about the kernels that compute a model."""

from __future__ import annotations

from .finding import Finding, Layer, found
from .window import ObservationWindow

# Share of a step's time that native kernels save at least (kernels/RESULTS.md).
SAVED = 0.5


def kernels_fallback(window: ObservationWindow) -> list[Finding]:
    """Return a finding for instances whose CPU kernels run on torch without a native library."""
    slow = [instance for instance in window.instances if instance.now("kernels_on_torch")]
    if not slow:
        return []
    return [
        found(
            "kernels_fallback",
            "Kernels run on torch, several times slower than native ones: there is no library for this processor.",
            Layer.L1,
            "kernels",
            [instance.name for instance in slow],
            {"instances": float(len(slow))},
            "install a C++ compiler (Debian, Ubuntu: apt-get install g++), let the kernels choose, "
            "and start again; the log gives the cause at `kernels run on torch`",
            cost=SAVED * sum(instance.mean("active") for instance in slow),
            requests=window.requests,
        )
    ]
