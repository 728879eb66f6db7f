"""Chat in the terminal, with one streamed reply or a dialogue: `motet chat`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Generator
from contextlib import closing
from typing import cast

from motet_cli.commands.server import Message, Server, read_key
from motet_shared.errors import MotetError, Unavailable

_HELP = "  /new starts a new conversation, /exit or Ctrl-D ends, Ctrl-C stops a reply."
_PROMPT = "you › "


def run(args: Namespace) -> int:
    with Server(args.url, read_key(args.api_key_file)) as server:
        conversation = Conversation(
            server, args.model or _first_model(server), args.system, args.temperature
        )
        prompt = " ".join(args.prompt)
        if not prompt and not sys.stdin.isatty():
            prompt = sys.stdin.read().strip()
            if not prompt:
                raise MotetError(
                    "PROMPT: standard input is empty; give a prompt, such as: motet chat 'hello'"
                )
        return _answer_once(conversation, prompt) if prompt else _dialogue(conversation)


def _first_model(server: Server) -> str:
    names = server.models()
    if not names:
        raise Unavailable(f"{server.url} serves no model yet; it may still be loading")
    return names[0]


class Conversation:
    """Keep the messages of a dialogue; of an interrupted reply, the part that was printed."""

    def __init__(self, server: Server, model: str, system: str | None, temperature: float) -> None:
        self.model = model
        self._temperature = temperature
        self._server = server
        self._start: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)

    def clear(self) -> None:
        self._messages = list(self._start)

    def say(self, text: str) -> None:
        """Send `text` and print the reply as it streams.

        Raises KeyboardInterrupt and MotetError; a message without any reply is not kept.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        shown = ""
        pieces = cast(
            Generator[str, None, None], self._server.reply(self.model, messages, self._temperature)
        )
        try:
            with closing(pieces):
                for piece in pieces:
                    shown += piece
                    print(piece, end="", flush=True)
        finally:
            if shown:
                print(flush=True)
                self._messages = [*messages, {"role": "assistant", "content": shown}]


def _answer_once(conversation: Conversation, prompt: str) -> int:
    conversation.say(prompt)
    return 0


def _dialogue(conversation: Conversation) -> int:
    import readline  # noqa: F401 - gives input() its line editing and history

    print(f"{conversation.model}\n{_HELP}")
    while True:
        try:
            text = input(_PROMPT).strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print(f"\n{_HELP}")
            continue
        if text == "/exit":
            return 0
        if text == "/new":
            conversation.clear()
        elif text:
            _say(conversation, text)


def _say(conversation: Conversation, text: str) -> None:
    try:
        conversation.say(text)
    except KeyboardInterrupt:
        print("(stopped)")
    except MotetError as error:
        print(f"error: {error.message}", file=sys.stderr)
