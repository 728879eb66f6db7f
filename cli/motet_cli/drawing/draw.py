"""Generate an image from text and write it to a file: `motet draw`."""

from __future__ import annotations

import base64
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from motet_cli.commands.server import Server, read_key
from motet_shared.errors import ConfigError, MotetError, Unavailable

from .output import write

_FORMATS = {"png": "png", "jpg": "jpeg", "jpeg": "jpeg", "webp": "webp"}
_BAR = 30  # characters
_FORMS = {
    "--controlnet": "NAME=FILE[:SCALE[:START:END]]",
    "--ip-adapter": "NAME=FILE[:SCALE]",
}


def run(args: Namespace) -> int:
    """Generate an image and write it; return 0."""
    output = Path(args.output)
    files = _files(args)
    fields = _fields(args, _format(output))
    with Server(args.url, read_key(args.api_key_file)) as server:
        names = [args.model] if args.model else server.models("image")
        if not names:
            raise Unavailable(
                f"{server.url} serves no image model yet; start one with: motet up --draw PATH"
            )
        picture = _show_progress(server.drawing(fields | {"model": names[0]}, files))
    write(args.output, picture)
    return 0


def _format(output: Path) -> str:
    ending = output.suffix.lstrip(".").lower()
    if ending not in _FORMATS:
        raise ConfigError(
            f"--output: {str(output)!r} names no format; end it with .{', .'.join(_FORMATS)}",
            param="--output",
        )
    return _FORMATS[ending]


def _files(args: Namespace) -> dict[str, Path]:
    files = {name: Path(path) for name in ("image", "mask") if (path := getattr(args, name))}
    for name, path in files.items():
        if not path.is_file():
            raise ConfigError(
                f"--{name}: {str(path)!r} is not a file; give an image file", param=f"--{name}"
            )
    if "mask" in files and "image" not in files:
        raise ConfigError(
            "--mask: needs the image that it belongs to; give --image too", param="--mask"
        )
    if args.strength is not None and "image" not in files:
        raise ConfigError(
            "--strength: needs an image to change; give --image too", param="--strength"
        )
    return files


def _fields(args: Namespace, output_format: str) -> dict[str, Any]:
    """Return the request body, with only the options that were given."""
    fields = {
        "prompt": " ".join(args.text),
        "output_format": output_format,
        "size": args.size,
        "steps": args.steps,
        "guidance_scale": args.guidance,
        "negative_prompt": args.negative or None,
        "seed": args.seed,
        "strength": args.strength,
        "loras": [_lora(given) for given in args.lora] or None,
        "scheduler": args.scheduler,
        "controlnets": [
            _condition("--controlnet", given, ("scale", "start", "end"))
            for given in args.controlnet
        ]
        or None,
        "ip_adapters": [_condition("--ip-adapter", given, ("scale",)) for given in args.ip_adapter]
        or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _lora(given: str) -> dict[str, Any]:
    """Parse `NAME:SCALE` or `NAME`; a name may contain colons if a scale follows.

    Raises ConfigError.
    """
    name, colon, scale = given.rpartition(":")
    try:
        lora = {"name": name, "scale": float(scale)} if colon else {"name": given}
    except ValueError:
        raise ConfigError(
            f"--lora: {scale!r} in {given!r} is not a number; give NAME or NAME:SCALE",
            param="--lora",
        ) from None
    if not lora["name"]:
        raise ConfigError(
            f"--lora: {given!r} names no adapter; give NAME or NAME:SCALE", param="--lora"
        )
    return lora


def _condition(flag: str, given: str, numbers: Sequence[str]) -> dict[str, Any]:
    """Parse `NAME=FILE` and numbers behind colons; a file's name may contain colons too.

    numbers: what they are, in order. Raises ConfigError.
    """
    form = _FORMS[flag]
    name, equals, rest = given.partition("=")
    if not name or not equals:
        raise ConfigError(f"{flag}: {given!r} is no name and file; give {form}", param=flag)
    parts = rest.split(":")
    for count in range(min(len(numbers) + 1, len(parts))):
        path = Path(":".join(parts[: len(parts) - count]))
        if path.is_file():
            break
    else:
        raise ConfigError(f"{flag}: {rest!r} is not a file; give {form}", param=flag)
    values = parts[len(parts) - count :]
    try:
        found = dict(zip(numbers, map(float, values), strict=False))
    except ValueError:
        message = f"{flag}: {':'.join(values)!r} in {given!r} is not a number; give {form}"
        raise ConfigError(message, param=flag) from None
    image = base64.b64encode(path.read_bytes()).decode()
    return {"name": name, "image": image, **found}


def _show_progress(events: Iterator[dict[str, Any]]) -> bytes:
    """Follow the events to the image and return its bytes.

    Shows a progress bar on standard error if that is a terminal.
    """
    shown = sys.stderr.isatty()
    for event in events:
        kind = str(event.get("type")).partition(".")[2]
        if kind == "progress" and shown:
            done = _BAR * int(event["step"]) // int(event["steps"])
            bar = "█" * done + "░" * (_BAR - done)
            print(f"\r{bar} {event['step']}/{event['steps']}", end="", file=sys.stderr, flush=True)
        elif kind == "completed":
            if shown:
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            return base64.b64decode(event["b64_json"])
    raise MotetError("the server ended the stream before the image was complete; try again")
