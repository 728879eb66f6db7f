"""Make a video from text and write it to a file: `motet film`."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from motet_cli.commands.server import Server, read_key
from motet_shared.errors import ConfigError, MotetError, Unavailable

from .output import write

T = TypeVar("T")

_BAR = 30  # characters
_POLL = 0.5  # seconds
_PATIENCE = 60.0  # seconds
_FORMATS = {".mp4": "mp4", ".webm": "webm"}  # of the file, by its ending


def run(args: Namespace) -> int:
    """Make a video and write it; return 0."""
    output = Path(args.output)
    image = _checked(output, args.image)
    with Server(args.url, read_key(args.api_key_file)) as server:
        names = [args.model] if args.model else server.models("video")
        if not names:
            raise Unavailable(
                f"{server.url} serves no video model yet; start one with: motet up --draw PATH"
            )
        video = server.film(_fields(args) | {"model": names[0]}, image)
        try:
            _wait(server, video)
            write(args.output, _patient(partial(server.film_content, video["id"])))
        finally:
            with suppress(MotetError):  # it expires
                server.delete_film(video["id"])
    return 0


def _checked(output: Path, image: str | None) -> Path | None:
    """Return the image's file. Raises ConfigError for a file that cannot be read or written."""
    if output.suffix.lower() not in _FORMATS:
        message = f"--output: {str(output)!r} is no video; end it with {' or '.join(_FORMATS)}"
        raise ConfigError(message, param="--output")
    if not output.parent.is_dir():
        message = f"--output: {str(output.parent)!r} is no folder; make it, or give another file"
        raise ConfigError(message, param="--output")
    if image is None:
        return None
    if not Path(image).is_file():
        raise ConfigError(f"--image: {image!r} is not a file; give an image file", param="--image")
    return Path(image)


def _fields(args: Namespace) -> dict[str, Any]:
    """Return the request's fields, with only the options that were given."""
    fields = {
        "prompt": " ".join(args.text),
        "seconds": args.seconds,
        "size": args.size,
        "steps": args.steps,
        "guidance_scale": args.guidance,
        "negative_prompt": args.negative or None,
        "seed": args.seed,
        "output_format": _FORMATS[Path(args.output).suffix.lower()],
    }
    return {name: value for name, value in fields.items() if value is not None}


def _patient(ask: Callable[[], T]) -> T:
    """Return what a server answers; asks again for a minute, in which it may be restarted."""
    give_up = time.monotonic() + _PATIENCE
    while True:
        try:
            return ask()
        except MotetError as error:
            if not error.retryable or time.monotonic() > give_up:
                raise
        time.sleep(_POLL)


def _wait(server: Server, video: dict[str, Any]) -> None:
    """Wait until the video is made, with a progress bar on standard error if that is a terminal.

    Raises MotetError if it failed.
    """
    shown = sys.stderr.isatty()
    while video["status"] not in ("completed", "failed"):
        time.sleep(_POLL)
        video = _patient(partial(server.film_status, video["id"]))
        if shown:
            done = _BAR * int(video["progress"]) // 100
            bar = "█" * done + "░" * (_BAR - done)
            print(f"\r{bar} {video['progress']} %", end="", file=sys.stderr, flush=True)
    if shown:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if video["status"] == "failed":
        raise MotetError(video["error"]["message"])
