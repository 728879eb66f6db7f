"""Chat over HTTP with OpenAI's client: each argument is a turn of one conversation.

python examples/chat.py "There is a red circle and a blue square." "How many circles are there?"
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


class Conversation:
    """Keep the messages of a conversation with the server's first chat model."""

    def __init__(self, client: OpenAI) -> None:
        self._client = client
        self._model = client.models.list().data[0].id
        self._messages: list[ChatCompletionMessageParam] = []
        self.tokens = 0  # of all prompts and replies so far

    def say(self, text: str) -> Iterator[str]:
        """Yield the reply as it is generated; leaving the iterator early cancels it."""
        self._messages.append({"role": "user", "content": text})
        reply = ""
        with self._client.chat.completions.create(
            model=self._model,
            messages=self._messages,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ) as chunks:
            for chunk in chunks:
                if chunk.usage is not None:
                    self.tokens += chunk.usage.total_tokens
                for choice in chunk.choices:
                    reply += choice.delta.content or ""
                    yield choice.delta.content or ""
        self._messages.append({"role": "assistant", "content": reply})


def main() -> None:
    parser = argparse.ArgumentParser(description="Hold a written conversation.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="(default: %(default)s)")
    parser.add_argument("--key", default="none", help="key of a tenant, where there are some")
    parser.add_argument("turns", metavar="TEXT", nargs="+")
    args = parser.parse_args()
    with OpenAI(base_url=f"{args.url}/v1", api_key=args.key) as client:
        conversation = Conversation(client)
        for turn in args.turns:
            print(f"you: {turn}\nmodel: ", end="")
            for piece in conversation.say(turn):
                print(piece, end="", flush=True)
            print()
        print(f"{conversation.tokens} tokens")


if __name__ == "__main__":
    main()
