"""Limits that gateways share: answers of JetStream that do not come, and tenants that return."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import nats.errors
import nats.js.errors
import pytest

from motet_gateway.storage.counts import LEASES, Count, SharedCounts
from motet_gateway.tenancy.shared_bucket import Account, Accounts
from motet_shared.testing import settle
from support.stages.tenants_stage import document, limited, refused

LEASE = 100
NAME = "acme.tokens"


class Keys:
    """Keep values as a bucket of JetStream does.

    failing: what becomes of an update, which is not answered: it is "applied", "lost", or applied
    "late", before the next one.
    """

    def __init__(self) -> None:
        self.failing = ""
        self._found: dict[str, tuple[bytes, int]] = {}
        self._late: tuple[str, bytes, int] | None = None

    async def get(self, name: str) -> Any:
        if name not in self._found:
            raise nats.js.errors.KeyNotFoundError
        value, revision = self._found[name]
        return SimpleNamespace(value=value, revision=revision)

    async def update(self, name: str, value: bytes, last: int) -> int:
        if self._late is not None:
            late, self._late = self._late, None
            self._put(*late)
        if self.failing == "late":
            self._late = name, value, last
        elif self.failing != "lost":
            self._put(name, value, last)
        if self.failing:
            raise nats.errors.TimeoutError
        return last + 1

    def _put(self, name: str, value: bytes, last: int) -> None:
        if self._found.get(name, (b"", 0))[1] != last:
            raise nats.js.errors.KeyWrongLastSequenceError
        self._found[name] = value, last + 1

    def count(self, name: str) -> Count:
        return msgspec.json.decode(self._found[name][0], type=Count)


def shared(keys: Any) -> SharedCounts:
    return SharedCounts(keys)


@pytest.mark.parametrize("has_others", [False, True])
@pytest.mark.parametrize("failing", ["applied", "lost", "late"])
async def test_a_change_without_an_answer_counts_once(failing: str, has_others: bool) -> None:
    keys = Keys()
    counts, others = shared(keys), shared(keys)
    account, other = Account(counts, NAME, "here"), Account(others, NAME, "there")
    bucket, theirs = (
        one.bucket_of(LEASES * LEASE, 3600, time.monotonic_ns) for one in (account, other)
    )
    await account.fetch(5)
    bucket.charge(5)
    account.count(5)
    keys.failing = failing
    await account.fetch(LEASE + 10)
    assert bucket.held == LEASE, "nothing is known to have come"
    keys.failing = ""
    if has_others:
        await other.fetch(1)
    counts._away_until = 0.0
    await account.report()
    count = keys.count(NAME)
    assert (count.used, account.used) == (5, 5)
    assert bucket.held == LEASE
    assert count.taken == pytest.approx(5 + bucket.held + theirs.held, abs=2)
    await account.report()
    assert keys.count(NAME).used == 5


def test_the_marks_of_gateways_that_have_ended_are_dropped() -> None:
    count = Count(last={"ended": ("change", time.time() - 3600)})
    count.mark("here", "another")
    assert count.last.keys() == {"here"}
    assert (count.last_of("here"), count.last_of("ended")) == ("another", "")


async def test_a_tenant_that_returns_has_the_lease_of_what_it_has_open(tmp_path: Path) -> None:
    limits = "concurrent_streams = 1"
    async with limited(tmp_path, limits) as here:
        service = here.made.service
        accounts = Accounts(shared(Keys()), service.metrics.tenants, "here")
        service.authenticator.share(accounts)
        for text in ("", document(limits)):
            here.path.write_text(text)
            assert service.tenants_file is not None
            service.tenants_file.read()
        here.made.tokenizer.pace = 60
        running = here.ask(stream=True)
        await settle(50)
        await refused(here.ask())
        slots = here.tenant().streams
        await slots.lease.report()
        assert (slots.open, slots.lease.leased) == (1, 1)
        running.leave()
        await running.done()
