"""Print the transcript of a sound file or microphone as it is understood: `motet listen`."""

from __future__ import annotations

import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from motet_cli.commands.captions import Captions
from motet_cli.commands.devices import Command, recorder
from motet_cli.commands.server import Server, read_key
from motet_shared.errors import ConfigError, MotetError, Unavailable


def run(args: Namespace) -> int:
    """Transcribe a file or the microphone. Return 0 once everything is printed."""
    if args.mic == bool(args.file):
        raise ConfigError("give a sound file or --mic, one of them")
    if args.speakers and (args.mic or args.translate):
        raise ConfigError("--speakers needs a sound file, and goes without --translate")
    return _listen_to_microphone(args) if args.mic else _listen_to_file(args)


def _listen_to_file(args: Namespace) -> int:
    path = Path(args.file).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"{args.file!r} is no file; give a sound file: wav, mp3, flac, ogg, m4a, webm"
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


def _print_speakers(said: Iterator[tuple[str, str]]) -> None:
    """Print a line per turn, which begins with its speaker."""
    before = None
    for speaker, text in said:
        if speaker == before:
            print(text, end="", flush=True)
        else:
            print(
                "\n" if before is not None else "",
                f"{speaker}: {text.lstrip()}",
                sep="",
                end="",
                flush=True,
            )
        before = speaker


def _listen_to_microphone(args: Namespace) -> int:
    """Transcribe until Ctrl-C, and then what was said until then; a second Ctrl-C ends at once."""
    if args.translate:
        raise ConfigError(
            "--translate needs a sound file; with --mic, text comes in the language that is spoken"
        )
    command, key = recorder(), read_key(args.api_key_file)
    with Server(args.url, key) as server:
        given = {"model": _model(server, args.model), **_settings(args)}
    with Captions(args.url, key) as captions, _recording(command) as program:
        assert program.stdout is not None
        print("listening; Ctrl-C ends it", file=sys.stderr)
        for piece in captions.of(program.stdout, given):
            print(piece, end="", flush=True)
    return 0


@contextmanager
def _recording(command: Command) -> Iterator[subprocess.Popen[bytes]]:
    """Run a recorder until the first Ctrl-C. Raises MotetError if it ends by itself."""
    stopped = False
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:

        def stop(number: int, frame: object) -> None:
            nonlocal stopped
            stopped = True
            signal.signal(signal.SIGINT, before)
            program.terminate()

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield program
        except BaseException:
            program.terminate()
            raise
        finally:
            signal.signal(signal.SIGINT, before)
    if program.returncode and not stopped:
        raise MotetError(
            f"{command[0]} could not record (exit code {program.returncode}); is there a microphone?"
        )


def _model(server: Server, name: str | None) -> str:
    names = [name] if name else server.models("transcription")
    if not names:
        raise Unavailable(
            f"{server.url} has no model that listens; start one with: motet up --asr PATH"
        )
    return names[0]


def _settings(args: Namespace) -> dict[str, str]:
    return {
        name: value
        for name, value in (("prompt", args.prompt), ("language", args.language))
        if value
    }
