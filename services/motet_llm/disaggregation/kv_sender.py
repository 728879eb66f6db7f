"""Pack the keys and values of prompts computed for other engines, while the next step runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from motet_llm.cache.kv_cache import KvCache
from motet_llm.engine.request import Request

from .kv_transfer import KvPart, pack, plan_parts


@dataclass(frozen=True, slots=True)
class Packed:
    """A part, its bytes (`uint8`, on the CPU) and their dtype."""

    part: KvPart
    content: Tensor
    dtype: str


class KvSender:
    """Pack parts on the thread that steps the engine.

    `part_bytes`: approximate upper bound of a part's size.
    """

    def __init__(self, kv: KvCache, part_bytes: int = 16 << 20):
        self.part_bytes = part_bytes
        self._kv = kv
        self._dtype = str(kv.dtype).removeprefix("torch.")
        self._parts = self._bytes = 0

    def pack(self, running: Iterable[Request]) -> list[tuple[Request, list[Packed]]]:
        """Return what was computed for others since the last call, cached prefixes included.

        Safe while a step is computed: that writes other slots of these blocks.
        """
        ready = [request for request in running if 0 <= request.sent < request.num_computed]
        return [(request, self._pack(request)) for request in ready]

    def _pack(self, request: Request) -> list[Packed]:
        parts = plan_parts(self._kv, request.sent, request.num_computed, self.part_bytes)
        request.sent = request.num_computed
        packed = [Packed(part, pack(self._kv, request.tables, part), self._dtype) for part in parts]
        self._parts += len(packed)
        self._bytes += sum(one.content.nbytes for one in packed)
        return packed

    def stats(self) -> dict[str, float]:
        return {"kv_parts_sent": self._parts, "kv_bytes_sent": self._bytes}
