"""Keep tenants' documents in memory, as `JetStreamDocuments` keeps them on disk."""

from __future__ import annotations

from motet_gateway.http.problems import NotFound
from motet_shared.errors import Unavailable


class MemoryDocuments:
    """Store documents.

    away: True makes the store unreachable.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], bytes] = {}
        self.away = False

    async def put(self, owner: str, name: str, data: bytes) -> None:
        self._check()
        self.kept[owner, name] = data

    async def create(self, owner: str, name: str, data: bytes) -> bool:
        self._check()
        return self.kept.setdefault((owner, name), data) == data

    async def names(self, owner: str, prefix: str) -> list[str]:
        self._check()
        names = [name for kept, name in self.kept if kept == owner]
        return sorted(name for name in names if name.rpartition(".")[0] == prefix)

    async def get(self, owner: str, name: str) -> bytes:
        self._check()
        try:
            return self.kept[owner, name]
        except KeyError:
            raise NotFound(f"{name!r} does not exist") from None

    async def delete(self, owner: str, name: str) -> None:
        self._check()
        self.kept.pop((owner, name), None)

    async def delete_all(self, owner: str) -> None:
        self._check()
        for key in [key for key in self.kept if key[0] == owner]:
            del self.kept[key]

    async def used(self, owner: str) -> int:
        self._check()
        return sum(len(data) for key, data in self.kept.items() if key[0] == owner)

    def _check(self) -> None:
        if self.away:
            raise Unavailable("the store is away")
