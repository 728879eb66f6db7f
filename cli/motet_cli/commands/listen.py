"""Print the transcript of a sound file or the microphone as it is recognized: `motet listen`."""

from __future__ import annotations

import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from motet_cli.commands.devices import Command, recorder
from motet_cli.commands.live_transcription import LiveTranscription
from motet_cli.commands.server import Server, read_key
from motet_shared.errors import ConfigError, MotetError, Unavailable


def run(args: Namespace) -> int:
    """Transcribe a file or the microphone and print the text; return 0."""
    if args.mic == bool(args.file):
        raise ConfigError("FILE, --mic: give either a sound file or --mic", param="FILE")
    if args.speakers and (args.mic or args.translate):
        raise ConfigError(
            "--speakers: needs a sound file, and excludes --translate", param="--speakers"
        )
    return _listen_to_microphone(args) if args.mic else _listen_to_file(args)


def _listen_to_file(args: Namespace) -> int:
    path = Path(args.file).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"FILE: {args.file!r} is not a file; give a sound file: wav, mp3, flac, ogg, m4a, webm",
            param="FILE",
        )
    with Server(args.url, read_key(args.api_key_file)) as server:
        model, given = _model(server, args.model), _settings(args)
        if args.translate:
            given.pop("language", None)
            print(server.translation(model, path, given))
            return 0
        try:
            if args.speakers:
                _print_speakers(server.conversation(model, path, given))
                return 0
            for piece in server.transcription(model, path, given):
                print(piece, end="", flush=True)
        finally:
            print(flush=True)
    return 0


def _print_speakers(turns: Iterator[tuple[str, str]]) -> None:
    """Print a line per turn, beginning with its speaker."""
    last_speaker = None
    for speaker, text in turns:
        if speaker == last_speaker:
            print(text, end="", flush=True)
        else:
            print(
                "\n" if last_speaker is not None else "",
                f"{speaker}: {text.lstrip()}",
                sep="",
                end="",
                flush=True,
            )
        last_speaker = speaker


def _listen_to_microphone(args: Namespace) -> int:
    """Transcribe until Ctrl-C and print the rest; a second Ctrl-C ends at once."""
    if args.translate:
        raise ConfigError(
            "--translate: needs a sound file; --mic transcribes in the spoken language",
            param="--translate",
        )
    command, key = recorder(), read_key(args.api_key_file)
    with Server(args.url, key) as server:
        given = {"model": _model(server, args.model), **_settings(args)}
    with LiveTranscription(args.url, key) as session, _recording(command) as program:
        assert program.stdout is not None
        print("listening; Ctrl-C ends it", file=sys.stderr)
        for piece in session.transcribe(program.stdout, given):
            print(piece, end="", flush=True)
    return 0


@contextmanager
def _recording(command: Command) -> Iterator[subprocess.Popen[bytes]]:
    """Run a recorder until the first Ctrl-C. Raises MotetError if it fails before."""
    stopped = False
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:

        def stop(number: int, frame: object) -> None:
            nonlocal stopped
            stopped = True
            signal.signal(signal.SIGINT, previous_handler)
            program.terminate()

        previous_handler = signal.signal(signal.SIGINT, stop)
        try:
            yield program
        except BaseException:
            program.terminate()
            raise
        finally:
            signal.signal(signal.SIGINT, previous_handler)
    if program.returncode and not stopped:
        raise MotetError(
            f"{command[0]} could not record (exit code {program.returncode}); is there a microphone?"
        )


def _model(server: Server, name: str | None) -> str:
    names = [name] if name else server.models("transcription")
    if not names:
        raise Unavailable(
            f"{server.url} serves no transcription model; start one with: motet up --asr PATH"
        )
    return names[0]


def _settings(args: Namespace) -> dict[str, str]:
    return {
        name: value
        for name, value in (("prompt", args.prompt), ("language", args.language))
        if value
    }
