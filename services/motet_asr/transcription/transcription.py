"""Transcribe a recording of any length: from its windows to final segments, in order.

Windows are transcribed in parallel, so that a long file fills the batch. A window's text is final
when it has ended, and if its cut fell into speech, when the next one has ended too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace

from motet_asr.engine.engine import Audio
from motet_asr.engine.recognizer import Recognizer
from motet_asr.engine.request import TimedSegment, TranscriptionOptions, WindowResult

from .stitch import join
from .windows import SpeechMarker, Window, cut, mark_by_level

WindowTask = asyncio.Task[tuple[WindowResult, list[TimedSegment]]]


@dataclass(frozen=True, slots=True)
class FinalWindow:
    """Hold the final segments of a window; times count from the start of the recording."""

    window: Window
    segments: list[TimedSegment]
    language: str


class Transcription:
    """Transcribe one recording.

    parallel: windows in the engine at a time.
    first: index of the first window to return.
    speech: marks where the recording has speech.
    """

    def __init__(
        self,
        recognizer: Recognizer,
        audio: Audio,
        options: TranscriptionOptions,
        *,
        parallel: int = 4,
        first: int = 0,
        speech: SpeechMarker = mark_by_level,
    ):
        self._recognizer, self._audio, self._options = recognizer, audio, options
        self._parallel, self._first, self._speech = parallel, first, speech
        self._windows: list[Window] = []

    async def final_windows(self) -> AsyncGenerator[FinalWindow, None]:
        """Yield windows in order, each once it is final. Closing early cancels pending windows."""
        longest = self._recognizer.family.window
        self._windows = await asyncio.to_thread(cut, self._audio, longest, self._speech)
        in_progress: deque[tuple[Window, WindowTask | None]] = deque()
        remaining = iter(self._windows[self._start() :])
        last_cut: FinalWindow | None = None
        try:
            while True:
                self._start_windows(in_progress, remaining)
                if not in_progress:
                    return
                window, task = in_progress.popleft()
                final_windows = await self._finalize(window, task)
                if last_cut is not None:
                    last_cut, final_windows = self._join(last_cut, final_windows)
                    if last_cut.window.index >= self._first:
                        yield last_cut
                    last_cut = None
                if self._is_cut_in_speech(window):
                    last_cut = final_windows
                elif window.index >= self._first:
                    yield final_windows
        finally:
            tasks = [task for _, task in in_progress if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self) -> int:
        """Return the first window to transcribe; one with an overlap needs its predecessor."""
        first = min(self._first, len(self._windows) - 1)
        while first > 0 and self._windows[first].overlap:
            first -= 1
        return first

    def _start_windows(
        self, in_progress: deque[tuple[Window, WindowTask | None]], remaining: Iterator[Window]
    ) -> None:
        """Start windows up to `parallel`; only one at a time until the language is known."""
        while len(in_progress) < (
            self._parallel if self._options.language or not self._detects else 1
        ):
            window = next(remaining, None)
            if window is None:
                return
            task = None if window.silent else asyncio.create_task(self._transcribe(window))
            in_progress.append((window, task))

    @property
    def _detects(self) -> bool:
        return self._recognizer.family.detects

    async def _transcribe(self, window: Window) -> tuple[WindowResult, list[TimedSegment]]:
        words = self._options.words or bool(window.overlap) or self._is_cut_in_speech(window)
        options = replace(self._options, words=words, seed=self._options.seed + window.index)
        return await self._recognizer.transcribe(window.of(self._audio), options)

    async def _finalize(self, window: Window, task: WindowTask | None) -> FinalWindow:
        if task is None:
            return FinalWindow(window, [], self._options.language)
        result, segments = await task
        if result.language:
            self._options = replace(self._options, language=result.language)
        return FinalWindow(
            window, [moved(segment, window.start) for segment in segments], result.language
        )

    def _is_cut_in_speech(self, window: Window) -> bool:
        following = self._windows[window.index + 1 : window.index + 2]
        return bool(following) and following[0].overlap > 0

    def _join(self, left: FinalWindow, right: FinalWindow) -> tuple[FinalWindow, FinalWindow]:
        start = right.window.start
        segments = join(left.segments, right.segments, start, start + right.window.overlap)
        return replace(left, segments=segments[0]), replace(right, segments=segments[1])


def moved(segment: TimedSegment, seconds: float) -> TimedSegment:
    """Return the segment and its words `seconds` later."""
    words = [word.moved(seconds) for word in segment.words]
    return replace(segment, start=segment.start + seconds, end=segment.end + seconds, words=words)
