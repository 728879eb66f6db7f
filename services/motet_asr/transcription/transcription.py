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
from motet_asr.engine.request import Heard, Options, Piece

from .stitch import join
from .windows import Speech, Window, cut, loud

WindowTask = asyncio.Task[tuple[Heard, list[Piece]]]


@dataclass(frozen=True, slots=True)
class Settled:
    """Final text of a window; times count from the start of the recording."""

    window: Window
    pieces: list[Piece]
    language: str


class Transcription:
    """Transcribe one recording.

    parallel: windows in the engine at a time.
    first: index of the first window that is wanted.
    """

    def __init__(
        self,
        recognizer: Recognizer,
        audio: Audio,
        options: Options,
        *,
        parallel: int = 4,
        first: int = 0,
        speech: Speech = loud,
    ):
        self._recognizer, self._audio, self._options = recognizer, audio, options
        self._parallel, self._first, self._speech = parallel, first, speech
        self._windows: list[Window] = []

    async def settled(self) -> AsyncGenerator[Settled, None]:
        """Yield windows in order, each once it is final. Closing early cancels pending windows."""
        longest = self._recognizer.family.window
        self._windows = await asyncio.to_thread(cut, self._audio, longest, self._speech)
        hearing: deque[tuple[Window, WindowTask | None]] = deque()
        todo = iter(self._windows[self._start() :])
        held: Settled | None = None
        try:
            while True:
                self._fill(hearing, todo)
                if not hearing:
                    return
                window, task = hearing.popleft()
                settled = await self._settle(window, task)
                if held is not None:
                    held, settled = self._joined(held, settled)
                    if held.window.index >= self._first:
                        yield held
                    held = None
                if self._is_cut_in_speech(window):
                    held = settled
                elif window.index >= self._first:
                    yield settled
        finally:
            tasks = [task for _, task in hearing if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self) -> int:
        """Return the first window to transcribe; one with an overlap needs its predecessor."""
        first = min(self._first, len(self._windows) - 1)
        while first > 0 and self._windows[first].overlap:
            first -= 1
        return first

    def _fill(
        self, hearing: deque[tuple[Window, WindowTask | None]], todo: Iterator[Window]
    ) -> None:
        """Start windows up to `parallel`; only one at a time until the language is known."""
        while len(hearing) < (self._parallel if self._options.language or not self._detects else 1):
            window = next(todo, None)
            if window is None:
                return
            task = None if window.silent else asyncio.create_task(self._hear(window))
            hearing.append((window, task))

    @property
    def _detects(self) -> bool:
        return bool(self._recognizer.family.languages)

    async def _hear(self, window: Window) -> tuple[Heard, list[Piece]]:
        words = self._options.words or bool(window.overlap) or self._is_cut_in_speech(window)
        options = replace(self._options, words=words, seed=self._options.seed + window.index)
        return await self._recognizer.hear(window.of(self._audio), options)

    async def _settle(self, window: Window, task: WindowTask | None) -> Settled:
        if task is None:
            return Settled(window, [], self._options.language)
        heard, pieces = await task
        if heard.language:
            self._options = replace(self._options, language=heard.language)
        return Settled(window, [moved(piece, window.start) for piece in pieces], heard.language)

    def _is_cut_in_speech(self, window: Window) -> bool:
        after = self._windows[window.index + 1 : window.index + 2]
        return bool(after) and after[0].overlap > 0

    def _joined(self, left: Settled, right: Settled) -> tuple[Settled, Settled]:
        start = right.window.start
        pieces = join(left.pieces, right.pieces, start, start + right.window.overlap)
        return replace(left, pieces=pieces[0]), replace(right, pieces=pieces[1])


def moved(piece: Piece, seconds: float) -> Piece:
    words = [word.moved(seconds) for word in piece.words]
    return replace(piece, start=piece.start + seconds, end=piece.end + seconds, words=words)
