"""`motet listen`: the text of a sound file, as it is understood."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from motet_cli.server import Server, read_key
from motet_shared.errors import ConfigError, Unavailable


def run(args: Namespace) -> int:
    """0 once all of it is printed."""
    path = Path(args.file).expanduser()
    if not path.is_file():
        raise ConfigError(f"{args.file!r} is no file; give a sound file: wav, mp3, flac, ogg, m4a, webm")
    fields = {"prompt": args.prompt, "language": "" if args.translate else args.language}
    with Server(args.url, read_key(args.api_key_file)) as server:
        names = [args.model] if args.model else server.models("transcription")
        if not names:
            raise Unavailable(f"{server.url} has no model that listens; start one with: motet up --asr PATH")
        given = {name: value for name, value in fields.items() if value}
        if args.translate:
            print(server.translation(names[0], path, given))
            return 0
        try:
            for piece in server.transcription(names[0], path, given):
                print(piece, end="", flush=True)
        finally:
            print(flush=True)
    return 0
