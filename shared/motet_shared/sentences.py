"""Text cut into what is spoken in one breath: sentences, and a first clause so that the first sound comes early.

    cutter = Cutter()
    for piece in reply:            # as a language model writes it
        for chunk in cutter.push(piece):
            speak(chunk.text)
    for chunk in cutter.flush():
        speak(chunk.text)

A cut is made as soon as it is certain, which takes a look at the letter after it: "3." may become "3.14", and "Dr." is
no end. Where the cuts are depends on the text alone, never on the pieces in which it came. The rules are those of
European languages and of Chinese and Japanese full stops; the abbreviations are English.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

FIRST_CLAUSE = 16  # characters that the first clause must have to be spoken before its sentence is complete
LONGEST = 280  # characters after which a sentence is cut at a comma, or else at a space

EMOJI = (
    "\u2600-\u27bf\u2b05-\u2b55\ufe0f\u200d\u20e3\u2190-\u21ff\u2300-\u23ff\U0001f000-\U0001faff\U000e0020-\U000e007f"
)
_CLOSERS = "\"')\\]}”’»*_`"
_ENDS = re.compile(
    rf"(?P<stop>[.!?…]+|[{EMOJI}]+)(?:[{_CLOSERS}{EMOJI}]|[.!?…])*(?=\s|$)"
    rf"|(?P<full>[。！？]+)[{_CLOSERS}」』]*"
    r"|(?P<comma>[,;:—–])(?=\s|$)"
    r"|(?P<line>\n)"
)
_WORD = re.compile(r"(?:^|[\s(\[{\"'“‘*_])([^\s(\[{\"'“‘*_]+)$")
_LIST_ITEM = re.compile(r"(?:[-*•+]|\d{1,3}[.)])\s")

# What a full stop after them does not end. The first are always followed by more, the others may end a sentence.
_TITLES = frozenset(
    "mr mrs ms dr prof st sr jr gen sen rep gov capt lt col sgt rev hon messrs mme mlle vs e.g i.e cf viz al fig figs"
    " eq vol pp ed eds ca approx nr dept est min max".split()
)
_BEFORE_NUMBERS = frozenset("no nos p art sec ch jan feb mar apr jun jul aug sep sept oct nov dec".split())


@dataclass(frozen=True, slots=True)
class Chunk:
    """`text` without the space around it; `start` and `end`: its place in the whole text, the space before included."""

    text: str
    start: int
    end: int


class Cutter:
    """Takes text in pieces and gives back chunks as soon as they are certain.

    begun: other sentences were spoken before, so there is no hurry with a first clause.
    """

    def __init__(self, *, begun: bool = False, first_clause: int = FIRST_CLAUSE, longest: int = LONGEST):
        self._first_clause = first_clause
        self._longest = longest
        self._rest = ""
        self._at = 0  # where `_rest` begins in the whole text
        self._any = begun

    def push(self, piece: str) -> list[Chunk]:
        self._rest += piece
        return list(self._cut(final=False))

    def flush(self) -> list[Chunk]:
        """The rest of the text, which ends here."""
        return list(self._cut(final=True))

    def _cut(self, final: bool) -> Iterator[Chunk]:
        while self._rest:
            end = self._next_end(final)
            if end is None:
                return
            text, start = self._rest[:end].strip(), self._at
            self._rest, self._at = self._rest[end:], start + end
            if text:
                self._any = True
                yield Chunk(text, start, self._at)

    def _next_end(self, final: bool) -> int | None:
        """Where the next chunk ends in the rest; None while that is not certain."""
        rest = self._rest
        spoken = len(rest) - len(rest.lstrip())
        comma = 0
        for match in _ENDS.finditer(rest):
            if match.end() > spoken + self._longest:
                break
            if match.start() < spoken:
                continue
            if match["comma"]:
                certain: bool | None = not self._any and match.end() - spoken >= self._first_clause
                if match.end() == len(rest) and not final:
                    certain = None  # a digit may follow, as in 1,000
                comma = match.end()
            else:
                certain = _is_end(rest, spoken, match, final)
            if certain is None:
                return None
            if certain:
                return match.end()
        if len(rest) > spoken + self._longest:
            return comma or _last_space(rest, spoken, spoken + self._longest)
        return len(rest) if final else None


def cut(text: str, *, begun: bool = False) -> list[Chunk]:
    """All chunks of a text that is complete."""
    cutter = Cutter(begun=begun)
    return cutter.push(text) + cutter.flush()


def _is_end(text: str, begin: int, match: re.Match[str], final: bool) -> bool | None:
    """Whether a sentence ends with `match`. None: the text has yet to show."""
    if match["full"]:
        return True if final or match.end() < len(text) else None
    following = text[match.end() :].lstrip()
    if not following:
        return True if final else None
    if match["line"]:
        return _is_line_end(text, match.end(), following, final)
    if following[0].islower():
        return False
    return not (match["stop"] == "." and _is_abbreviation(text[begin : match.start()], following[0]))


def _is_line_end(text: str, end: int, following: str, final: bool) -> bool | None:
    """An empty line ends a sentence, and so does the beginning of an item of a list; a wrapped line does not."""
    gap = text[end : len(text) - len(following)]
    if "\n" in gap:
        return True
    if len(following) < 5 and not final and re.fullmatch(r"[-*•+]|\d{1,3}[.)]?", following):
        return None
    return _LIST_ITEM.match(following) is not None


def _is_abbreviation(before: str, following: str) -> bool:
    """Whether the full stop after `before` belongs to its last word rather than to the sentence."""
    found = _WORD.search(before)
    if found is None:
        return False
    word = found[1].lower()
    if word in _TITLES or (word in _BEFORE_NUMBERS and following.isdigit()):
        return True
    if len(word) == 1 and word.isalpha():  # an initial, unless it is the pronoun
        return found[1].isupper() and word != "i"
    return word.isdigit() and found.start(1) == 0  # the number of a list's item


def _last_space(text: str, begin: int, end: int) -> int:
    space = max(text.rfind(" ", begin, end + 1), text.rfind("\n", begin, end + 1))
    return space if space > begin else end
