"""Pack the keys and values of prompts computed for other engines, while the next step runs."""

from __future__ import annotations

from motet_llm.cache.kv_cache import KvCache
from motet_llm.engine.feature import Feature
from motet_llm.engine.outputs import StepOutput
from motet_llm.engine.request import Request, RequestOptions

from .kv_transfer import KvPart, PackedPart, pack, plan_parts


class KvSender(Feature):
    """Pack parts on the thread that steps the engine.

    `part_bytes`: approximate upper bound of a part's size.
    """

    def __init__(self, kv: KvCache, part_bytes: int = 16 << 20):
        self.part_bytes = part_bytes
        self._kv = kv
        self._dtype = str(kv.dtype).removeprefix("torch.")
        self._sent: dict[Request, int] = {}  # tokens that the other engine has or is about to get
        self._parts = self._bytes = 0

    def admit(self, request: Request, options: RequestOptions) -> None:
        if "send_from" in options:
            self._sent[request] = options["send_from"]
            request.constraints.prefill_only = True

    def forget(self, request: Request) -> None:
        self._sent.pop(request, None)

    def outputs(self) -> list[StepOutput]:
        """Return what was computed for others since the last call, cached prefixes included.

        Safe while a step is computed: that writes other slots of these blocks.
        """
        ready = [request for request, sent in self._sent.items() if sent < request.num_computed]
        return [self._output(request) for request in ready]

    def _output(self, request: Request) -> StepOutput:
        request.emitted += 1
        finish = None if request.num_uncomputed else "stop"
        return StepOutput(request.key, [], finish=finish, packed=self._pack(request))

    def _pack(self, request: Request) -> list[PackedPart]:
        start, stop = self._sent[request], request.num_computed
        self._sent[request] = stop
        parts = plan_parts(self._kv, start, stop, self.part_bytes)
        packed = [self._pack_part(request, part) for part in parts]
        self._parts += len(packed)
        self._bytes += sum(one.content.nbytes for one in packed)
        return packed

    def _pack_part(self, request: Request, part: KvPart) -> PackedPart:
        return PackedPart(part, pack(self._kv, request.tables, part), self._dtype)

    def stats(self) -> dict[str, float]:
        return {"kv_parts_sent": self._parts, "kv_bytes_sent": self._bytes}
