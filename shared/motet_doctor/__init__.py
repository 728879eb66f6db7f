"""Diagnose bottlenecks of a stack by pure rules over heartbeats and reply timings.

    window = ObservationWindow.of(snapshots, timings)  # directory samples, reply timings
    for finding in diagnose(window):  # highest cost first; empty if healthy
        print(finding.what, finding.knob)

`window` holds the numbers, `finding` the result type; `engine`, `fleet`, `front`, `gpus`, `kernels`,
`machine` and `stages` hold the rules. A rule is a function from a window to findings, with its thresholds
defined above it. Rules use shares and counts rather than absolute times, so that they apply equally
to slow and fast machines.
"""

from .finding import Finding, Layer
from .rules import diagnose
from .window import ObservationWindow, Snapshot

__all__ = ["Finding", "Layer", "ObservationWindow", "Snapshot", "diagnose"]
