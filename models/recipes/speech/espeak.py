"""Synthesize speech in process with espeak-ng, with the times of words and phonemes.

The library and its data come from the package `espeakng-loader`. Its state is global: use it from
one thread at a time.
"""

from __future__ import annotations

import _ctypes
import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import espeakng_loader
import numpy as np
from numpy.typing import NDArray

from recipes.training.errors import RecipeError

SYNCHRONOUS, PHONEME_EVENTS, DONT_EXIT = 2, 0x0001, 0x8000
UTF8, BY_CHARACTER = 1, 1
WORD, PHONEME, END_OF_LIST = 1, 7, 0
RATE, VOLUME, PITCH, RANGE = 1, 2, 3, 4


class _Id(ctypes.Union):
    _fields_ = (("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8))


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", _Id),
    )


_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


@dataclass(frozen=True, kw_only=True)
class Voice:
    """Define how to speak.

    name: accent and variant ("en-us+f2"). rate: words per minute. pitch, range: 0 to 100.
    """

    name: str = "en-us"
    rate: int = 175
    pitch: int = 50
    range: int = 50


class SpeechMark(NamedTuple):
    """Hold the start, in seconds, of a word (by its character) or a phoneme (by its espeak name)."""

    second: float
    character: int = -1
    phoneme: str = ""


@dataclass(frozen=True, kw_only=True)
class Speech:
    """Hold mono samples from -1 to 1, and the marks of words and phonemes in order."""

    samples: NDArray[np.float32]
    rate: int
    words: tuple[SpeechMark, ...]
    phonemes: tuple[SpeechMark, ...]

    @property
    def seconds(self) -> float:
        """Return the duration."""
        return len(self.samples) / self.rate


class _EspeakLibrary:
    """Load the library anew, since oscillators and random numbers persist between sentences."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(espeakng_loader.get_library_path())
        path = str(espeakng_loader.get_data_path()).encode()
        self.rate = int(
            self.library.espeak_Initialize(SYNCHRONOUS, 0, path, PHONEME_EVENTS | DONT_EXIT)
        )
        if self.rate <= 0:
            raise RuntimeError(
                f"espeak-ng did not start with the data in {path.decode()}: reinstall espeakng-loader"
            )
        self._callback = _CALLBACK(self._receive)  # referenced: the library holds only its address
        self.library.espeak_SetSynthCallback(self._callback)
        self.parts: list[bytes] = []
        self.words: list[SpeechMark] = []
        self.phonemes: list[SpeechMark] = []

    def __enter__(self) -> _EspeakLibrary:
        return self

    def __exit__(self, *_: object) -> None:
        self.library.espeak_Terminate()
        _ctypes.dlclose(self.library._handle)

    def _receive(self, samples: Any, count: int, events: Any) -> int:
        if samples and count > 0:
            self.parts.append(ctypes.string_at(samples, 2 * count))
        index = 0
        while (event := events[index]).type != END_OF_LIST:
            second = event.audio_position / 1000
            if event.type == WORD:
                self.words.append(SpeechMark(second, character=event.text_position - 1))
            elif event.type == PHONEME:
                self.phonemes.append(
                    SpeechMark(second, phoneme=event.id.string.decode("utf-8", "replace"))
                )
            index += 1
        return 0

    def synthesize(self, text: str, voice: Voice) -> None:
        """Speak a text into `parts`. Raises RecipeError for an unknown voice."""
        if self.library.espeak_SetVoiceByName(voice.name.encode()) != 0:
            raise RecipeError(
                f"voice={voice.name!r} is unknown to espeak-ng: use one like 'en-us+f2'",
                param="voice",
            )
        for parameter, value in (
            (RATE, voice.rate),
            (VOLUME, 100),
            (PITCH, voice.pitch),
            (RANGE, voice.range),
        ):
            self.library.espeak_SetParameter(parameter, value, 0)
        encoded = text.encode()
        self.library.espeak_Synth(encoded, len(encoded) + 1, 0, BY_CHARACTER, 0, UTF8, None, None)


def speak(text: str, voice: Voice) -> Speech:
    """Speak `text`; the result depends on the arguments alone.

    Raises RecipeError for an unknown voice. The library is unloaded after each sentence, since
    nothing else resets it; that costs four milliseconds.
    """
    with _EspeakLibrary() as made:
        made.synthesize(text, voice)
        samples = np.frombuffer(b"".join(made.parts), np.int16).astype(np.float32) / np.float32(
            32768
        )
        return Speech(
            samples=samples, rate=made.rate, words=tuple(made.words), phonemes=tuple(made.phonemes)
        )
