"""Count speech as its listeners have it, by model: first audio, real-time factor, underruns."""

from __future__ import annotations

from motet_pipelines.voice.playout import Playout
from motet_shared.process.telemetry import Metrics

# Bounds of the real-time factor: seconds of waiting per second of audio; above 1, speech stalls.
FACTORS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5, 2.5, 5.0)


class SpeechMetrics:
    """Hold the metrics of spoken texts, each observed once, when it is over."""

    def __init__(self, metrics: Metrics):
        self._first_audio = metrics.histogram(
            "speech_first_audio", "seconds", "time from a text to its first audio", ("model",)
        )
        self._factor = metrics.histogram(
            "speech_realtime",
            "factor",
            "seconds of waiting per second of audio of a text",
            ("model",),
            FACTORS,
        )
        self._audio = metrics.counter(
            "speech_audio", "seconds", "audio sent to clients", ("model",)
        )
        self._underruns = metrics.counter(
            "speech", "underruns", "times that a listener had nothing to play", ("model",)
        )
        self._stalled = metrics.counter(
            "speech_stalled", "seconds", "silence of listeners in underruns", ("model",)
        )

    def observe(self, model: str, playout: Playout) -> None:
        """Count one text; one without any audio is left out."""
        if playout.first_audio is None or playout.realtime_factor is None:
            return
        self._first_audio.labels(model).observe(playout.first_audio)
        self._factor.labels(model).observe(playout.realtime_factor)
        self._audio.labels(model).inc(playout.seconds)
        self._underruns.labels(model).inc(playout.underruns)
        self._stalled.labels(model).inc(playout.stalled)
