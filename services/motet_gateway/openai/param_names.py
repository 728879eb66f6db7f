"""Name the parameters of another protocol in errors of a chat.

Everything that a chat checks is checked once, in the chat's own terms; the protocols that are
served through it translate the paths: `messages[2].content[0]` becomes `input[4].content[1]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from motet_shared.errors import MotetError

_QUOTED = re.compile(r"`[^`]*`")  # a parameter within a message
_PART = re.compile(r"messages\[(?P<message>\d+)\](?:\.content\[(?P<part>\d+)\])?")

Patterns = Sequence[tuple[re.Pattern[str], str]]


@dataclass(frozen=True, slots=True)
class ParamNames:
    """Paths of a client's request.

    messages: the path from which each message of the chat was made. parts: the same for a part of
    a message's content, by the indices of both. whole: the name of the conversation, for messages
    beyond these. patterns: replacements in other paths.
    """

    messages: tuple[str, ...] = ()
    parts: Mapping[tuple[int, int], str] = field(default_factory=dict)
    whole: str = "messages"
    patterns: Patterns = ()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Rename parameters in errors of the block."""
        try:
            yield
        except MotetError as error:
            if error.param is not None:
                error.param = self.rename(error.param)
            error.message = _QUOTED.sub(lambda found: self.rename(found[0]), error.message)
            raise

    def rename(self, text: str) -> str:
        """Return a path of a chat's body in the client's terms."""
        text = _PART.sub(self._of_message, text)
        for pattern, name in self.patterns:
            text = pattern.sub(name, text)
        return text

    def _of_message(self, found: re.Match[str]) -> str:
        index, part = int(found["message"]), found["part"]
        if part is not None and (index, int(part)) in self.parts:
            return self.parts[index, int(part)]
        name = self.messages[index] if index < len(self.messages) else self.whole
        return name if part is None else f"{name}.content[{part}]"
