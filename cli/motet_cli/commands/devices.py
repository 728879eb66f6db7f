"""Find a program that plays to this machine's speakers, or records from its microphone, as PCM."""

from __future__ import annotations

import shutil

from motet_shared.errors import ConfigError

RATE = 24_000  # Hz; mono, 16 bits
Command = tuple[str, ...]

# In order of preference. Those of PipeWire come last: their raw format depends on the version.
_PLAYERS: tuple[Command, ...] = (
    ("paplay", "--raw", f"--rate={RATE}", "--channels=1", "--format=s16le"),
    ("aplay", "-q", "-t", "raw", "-r", str(RATE), "-c", "1", "-f", "S16_LE", "-"),
    ("ffplay", "-loglevel", "error", "-nodisp", "-autoexit", "-f", "s16le", "-ar", str(RATE), "-"),
    ("play", "-q", "-t", "raw", "-r", str(RATE), "-c", "1", "-e", "signed", "-b", "16", "-"),
    ("pw-play", f"--rate={RATE}", "--channels=1", "--format=s16", "-"),
)
_RECORDERS: tuple[Command, ...] = (
    ("parec", "--raw", f"--rate={RATE}", "--channels=1", "--format=s16le", "--latency-msec=50"),
    ("arecord", "-q", "-t", "raw", "-r", str(RATE), "-c", "1", "-f", "S16_LE", "-"),
    ("rec", "-q", "-t", "raw", "-r", str(RATE), "-c", "1", "-e", "signed", "-b", "16", "-"),
    ("pw-record", f"--rate={RATE}", "--channels=1", "--format=s16", "-"),
)


def player() -> Command:
    """Return a command that plays PCM from standard input. Raises ConfigError if none exists."""
    return _find(
        _PLAYERS,
        "--output",
        "--output: no program for playback is installed ({}); install one, or give --output FILE",
    )


def recorder() -> Command:
    """Return a command that writes the microphone's PCM to standard output.

    Raises ConfigError if none exists.
    """
    return _find(
        _RECORDERS,
        "--mic",
        "--mic: no program for recording is installed ({}); install one, or give a sound file",
    )


def _find(commands: tuple[Command, ...], param: str, otherwise: str) -> Command:
    for command in commands:
        if shutil.which(command[0]):
            return command
    names = ", ".join(command[0] for command in commands)
    raise ConfigError(otherwise.format(names), param=param)
