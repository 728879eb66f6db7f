"""The command line of `motet`. What a command needs is imported when it runs: help must come at once."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from motet_shared.errors import MotetError

DEFAULT_URL = "http://127.0.0.1:8000"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 failed, 2 wrong command line, 130 interrupted."""
    args = parser().parse_args(argv)
    command = importlib.import_module(f"motet_cli.{args.module}")
    try:
        return int(command.run(args))
    except MotetError as error:
        print(f"motet {args.command}: {error.message}", file=sys.stderr)
        return 2 if error.code == "config" else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
        return 0


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="motet", description="Streaming inference from small services behind NATS.", allow_abbrev=False
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_up(commands)
    _add_chat(commands)
    _add_models(commands)
    return top


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, module: str, help: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    command.set_defaults(module=module)
    return command


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    up = _command(commands, "up", "up", "Start NATS and every service on this machine, until Ctrl-C.")
    up.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    up.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free one (default: %(default)s)")
    up.add_argument(
        "--llm",
        metavar="PATH",
        action="append",
        default=[],
        help="checkpoint folder to serve under its name, or the name of a local model; may be repeated"
        " (default: pocket-chat)",
    )
    up.add_argument("--decode", metavar="N", type=int, default=1, help="decode processes per model (default: 1)")
    up.add_argument("--tokenizer", metavar="N", type=int, default=1, help="tokenizer processes (default: 1)")
    up.add_argument("--nats", metavar="URL", help="use this NATS server instead of starting one")
    up.add_argument("--api-key-file", metavar="PATH", help="file with the key that clients must show")
    up.add_argument("--insecure", action="store_true", help="let other machines in without a key")
    up.add_argument("--log-format", choices=("text", "json"), default="text", help="text for people, json for machines")
    up.add_argument("--state-file", metavar="PATH", help="keep the process ids and instances in this JSON file")


def _add_server(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", default=DEFAULT_URL, help="where the server is (default: %(default)s)")
    command.add_argument("--api-key-file", metavar="PATH", help="file with the server's key [MOTET_API_KEY_FILE]")


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    chat = _command(
        commands, "chat", "chat", "Talk to a model: one answer to PROMPT or standard input, else a dialogue."
    )
    _add_server(chat)
    chat.add_argument("--model", help="the model to talk to (default: the server's first)")
    chat.add_argument(
        "--temperature", type=float, default=0.0, help="0 always says the likeliest; higher is freer (default: 0)"
    )
    chat.add_argument("--system", metavar="TEXT", help="instructions that come before the conversation")
    chat.add_argument("prompt", metavar="PROMPT", nargs="*", help="what to say")


def _add_models(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _add_server(_command(commands, "models", "list_models", "List what the server serves and the local model folders."))
