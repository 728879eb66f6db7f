"""Encode large prompts, one at a time: `python -m motet_tokenizer.encoding.encoder_process`.

Arguments: MODEL=FOLDER, once per model, and `--chat-template MODEL=FILE`. Jobs are read from stdin,
answers are written to stdout: eight bytes of length (little-endian), then MessagePack. The parent
kills the process to stop a job; it ends with its parent.
"""

from __future__ import annotations

import argparse
import os
import struct
import sys
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO

from msgspec import Struct, msgpack

if TYPE_CHECKING:
    from motet_tokenizer.encoding.vocabulary import Vocabulary

HEAD = struct.Struct("<Q")


class EncodeJob(Struct, array_like=True):
    """Request the token ids of a chat, or of a raw prompt if `text` is given."""

    model: str
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    options: dict[str, Any] = {}  # variables of the chat template
    text: str | None = None
    suffix: str = ""  # text behind the gap, if the reply fills one
    starts_turn: bool = True
    continues: bool = False
    special_tokens: bool = True  # of a raw prompt


class EncodeAnswer(Struct, array_like=True):
    """Carry token ids as 32-bit integers, or the error that refuses the prompt."""

    ids: bytes = b""
    code: str = ""
    message: str = ""
    param: str | None = None


def framed(message: Struct) -> bytes:
    """Return a message as bytes for the pipe, with its length before it."""
    data = msgpack.encode(message)
    return HEAD.pack(len(data)) + data


def main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # as in the tokenizer itself
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries that print must not write into the answers
    from motet_shared.process.actor import die_with_parent
    from motet_tokenizer.config import split_model

    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*")
    parser.add_argument("--chat-template", action="append", default=[])
    parser.add_argument("--tool-format", required=True)
    parser.add_argument("--reasoning-format", required=True)
    args = parser.parse_args()
    folders = dict(map(split_model, args.models))
    templates = dict(map(split_model, args.chat_template))
    loaded: dict[str, Vocabulary] = {}

    def load(model: str) -> Vocabulary:
        from motet_tokenizer.encoding.vocabulary import Vocabulary

        if model not in loaded:
            loaded[model] = Vocabulary.load(
                model,
                folders[model],
                args.tool_format,
                args.reasoning_format,
                chat_template=templates.get(model),
            )
        return loaded[model]

    while (data := _frame(jobs)) is not None:
        answers.write(framed(_answer(msgpack.decode(data, type=EncodeJob), load)))
        answers.flush()


def _frame(jobs: BinaryIO) -> bytes | None:
    head = jobs.read(HEAD.size)
    return jobs.read(HEAD.unpack(head)[0]) if len(head) == HEAD.size else None


def _answer(job: EncodeJob, load: Callable[[str], Vocabulary]) -> EncodeAnswer:
    from motet_shared.errors import as_motet_error
    from motet_tokenizer.encoding.prompt_end import PromptEnd

    try:
        vocabulary = load(job.model)
        if job.text is not None:
            ids = vocabulary.encode(job.text, job.suffix, special_tokens=job.special_tokens)
            return EncodeAnswer(array("i", ids).tobytes())
        end = PromptEnd(job.starts_turn, job.continues)
        ids = vocabulary.template.encode(job.messages, job.tools, job.options, end)
        return EncodeAnswer(array("i", ids).tobytes())
    except Exception as error:  # any error concerns this prompt alone; the process continues
        known = as_motet_error(error)
        return EncodeAnswer(code=known.code, message=known.message, param=known.param)


if __name__ == "__main__":
    main()
