"""A service of one's own: embeddings without a model, by hashing words, as an instance of a role.

    eval "$(motet credentials environment --role embedding)"
    python examples/service.py --size 512

The gateway finds it by its heartbeats and serves it at /v1/embeddings under its model's name,
beside the models of other instances. It connects as the NATS user `embedding`, which may take work
of that role and answer the gateway, and nothing else (`services/nats.conf`). SIGTERM drains it.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from dataclasses import dataclass

from motet_shared.errors import BadRequest
from motet_shared.messages import Embed, ModelCard, Usage, Vectors
from motet_shared.process.actor import Actor, operation, run
from motet_shared.process.config import ProcessConfig, setting
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True)
class HashingConfig(ProcessConfig):
    """Settings: flags and `MOTET_*` variables follow from the fields."""

    model_name: str = setting("name under which it is served", default="hashed-words")
    size: int = setting("numbers of a vector", default=256, min=8, max=4096)


class HashedWords(Actor):
    """Embed texts by the hashes of their words: the more words two texts share, the nearer."""

    role = "embedding"
    config: HashingConfig

    def __init__(self, config: HashingConfig, bus: Bus):
        super().__init__(config, bus)
        self._texts = 0  # embedded since the start

    def models(self) -> list[ModelCard]:
        return [ModelCard(name=self.config.model_name, context=8192)]

    def stats(self) -> dict[str, int]:
        return {"texts": self._texts}

    @operation(Embed)
    async def embed(self, call: Call, request: Embed) -> None:
        """Send the vectors, one item per text. Raises BadRequest for token ids."""
        self.check_served(request.model)
        size = request.dimensions or self.config.size
        if size > self.config.size:
            raise BadRequest(
                f"dimensions: {size} is too many; give at most {self.config.size}",
                param="dimensions",
            )
        tokens = 0
        for number, text in enumerate(request.input, request.first):
            if not isinstance(text, str):
                raise BadRequest(
                    f"input: element {number} is token ids; this model takes texts", param="input"
                )
            words = _WORD.findall(text.lower())
            await call.send(Vectors(embedding(words, size), 1, len(words)))
            tokens += len(words)
            self._texts += 1
        call.finish("stop", Usage(prompt_tokens=tokens))


def embedding(words: list[str], size: int) -> bytes:
    """Return a vector of unit length as float32, little-endian; without words it is zero."""
    vector = [0.0] * size
    for word in words:
        digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
        place, sign = int.from_bytes(digest[:7], "little"), 1 - 2 * (digest[7] & 1)
        vector[place % size] += sign
    length = math.sqrt(sum(value * value for value in vector)) or 1.0
    return struct.pack(f"<{size}f", *(value / length for value in vector))


if __name__ == "__main__":
    run(HashedWords, HashingConfig)
