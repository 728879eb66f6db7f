"""Send token ids, their texts, and the text of many ids, in items of bounded size."""

from __future__ import annotations

from motet_shared.messages import Text, TokenIds
from motet_shared.wire.call import Call
from motet_tokenizer.encoding.vocabulary import Vocabulary

_IDS = 1 << 15  # most ids of an item; their texts have a few characters each
_CHARACTERS = 1 << 18  # most characters of an item


async def send_ids(call: Call, vocabulary: Vocabulary, ids: list[int], *, pieces: bool) -> None:
    """Send the ids of a prompt; with `pieces`, also the text of each.

    A token that is part of a character has U+FFFD for it.
    """
    for start in range(0, len(ids), _IDS):
        part = ids[start : start + _IDS]
        texts = [vocabulary.token_bytes(i).decode("utf-8", "replace") for i in part]
        await call.send(TokenIds(part, texts if pieces else []))


async def send_text(call: Call, text: str) -> None:
    """Send a text that no reply has written."""
    for start in range(0, len(text), _CHARACTERS):
        await call.send(Text(text[start : start + _CHARACTERS], []))
