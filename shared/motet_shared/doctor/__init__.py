"""What is short in a stack: pure rules over what heartbeats and replies told in a stretch of time.

    window = Window.of(looks, timings)      # a few looks at the directory, and where replies spent their time
    for finding in diagnose(window):        # those that cost most first; none: healthy
        print(finding.what, finding.knob)

`window` holds the numbers, `finding` the shape of an answer, `engine`, `fleet`, `front` and `machine` the rules. A rule
is a function from a window to findings, with its thresholds named above it. Each goes by shares and counts, not by
absolute times, so that it says the same of a slow machine and of a fast one.
"""

from .finding import Finding, Layer
from .rules import diagnose
from .window import Look, Window

__all__ = ["Finding", "Layer", "Look", "Window", "diagnose"]
