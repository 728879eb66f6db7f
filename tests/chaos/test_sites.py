"""A site that is lost as a whole, dark or cut off, and a tenant whose work may be done at one site alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from chaos.processes import Processes, processes
from chaos.streams import Outcome, Streams, request
from e2e import markov
from motet_shared.tenants import digest
from motet_shared.testing import free_port

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(180)]

MODEL, STREAMS, TOKENS = "markov", 12, 200
PAUSE = 3.0  # seconds that a stream may pause when its site is lost
ANYWHERE, AT_B = "sk-motet-anywhere", "sk-motet-at-b"
REQUESTS = [request(number, MODEL, TOKENS) for number in range(STREAMS)]
SITES = {"a": 2, "b": 1}  # tokenizers, and decode workers, of each


class Sites:
    """A gateway at a site of its own, `front`, and the sites behind it."""

    def __init__(self, running: Processes, url: str):
        self._running, self._url = running, url

    def streams(self, key: str = ANYWHERE) -> Streams:
        return Streams(self._url, REQUESTS, key)

    async def answered(self, key: str = ANYWHERE) -> list[Outcome]:
        async with self.streams(key) as streams:
            return await streams.finish()

    async def heard(self) -> None:
        """Wait until every process of both sites is heard and takes work."""
        await self._running.all_ready()
        await asyncio.sleep(1.5)  # two heartbeats, behind which no suspicion lasts

    async def load(self, site: str, name: str) -> float:
        """Return the sum of a load over the instances of a site, as announced after this call."""
        await asyncio.sleep(0.7)
        beats = self._running.bus.directory.everyone()
        return sum(beat.load.get(name, 0.0) for beat in beats if beat.site == site)

    @contextmanager
    def severed(self, site: str) -> Iterator[None]:
        """Cut the network of a site in the block: its processes run, and reach NATS no more."""
        with ExitStack() as cuts:
            for one in self._running.members:
                if f"--site={site}" in one.argv:
                    cuts.enter_context(one.line.severed())
            yield

    @contextmanager
    def dark(self, site: str) -> Iterator[None]:
        """Stop all processes of a site at once, and let them go on after the block."""
        pids = [one.pid for one in self._running.members if f"--site={site}" in one.argv]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def two_sites(folder: Path) -> AsyncIterator[Sites]:
    model = await asyncio.to_thread(markov.save, folder / MODEL)
    tenants = folder / "tenants.toml"
    tenants.write_text(
        '[tenants.any]\n\n[tenants.kept]\nsites = ["front", "b"]\n\n'
        f'[[keys]]\ntenant = "any"\nsha256 = "{digest(ANYWHERE)}"\n\n'
        f'[[keys]]\ntenant = "kept"\nsha256 = "{digest(AT_B)}"\n'
    )
    async with processes() as running:
        port = free_port()
        gateway = ("--port", str(port), "--tenants-file", str(tenants), "--patience", "2")
        await running.add("gateway", "gateway", ("motet_gateway", *gateway, "--site=front"))
        for site, count in SITES.items():
            for n in range(count):
                at = f"--site={site}"
                text = ("motet_tokenizer", "--model", f"{MODEL}={model}", at)
                await running.add(f"tokenizer-{site}{n}", "tokenizer", text)
                engine = ("motet_llm", f"--model={model}", f"--name={MODEL}", "--threads=1", at)
                await running.add(f"decode-{site}{n}", "decode", (*engine, "--num-blocks=1000"))
        sites = Sites(running, f"http://127.0.0.1:{port}")
        await sites.heard()
        yield sites


async def test_a_lost_site_moves_its_streams_and_never_those_that_may_not_leave(
    tmp_path: Path,
) -> None:
    async with two_sites(tmp_path) as sites:
        undisturbed = await sites.answered()
        assert all(one.finish == "length" for one in undisturbed)

        for how, lost in (("dark", sites.dark), ("cut off", sites.severed)):
            async with sites.streams() as streams:
                await streams.reached(20)
                at_a = await sites.load("a", "active")
                with lost("a"):
                    moved = await streams.finish()
                    pause = max(one.longest_pause for one in moved)
                    print(f"site a {how}, {at_a:g} calls there: longest pause {pause:.2f} s")
                    assert at_a >= 2
                    assert all(map(Outcome.same_as, moved, undisturbed))
                    assert pause <= PAUSE
            await sites.heard()

        before = await sites.load("a", "requests")
        kept = await sites.answered(AT_B)
        assert all(map(Outcome.same_as, kept, undisturbed))
        assert await sites.load("a", "requests") == before, "nothing went to a forbidden site"

        async with sites.streams(AT_B) as streams:
            await streams.reached(20)
            with sites.dark("b"):
                cut_off = await streams.finish()
                refused = await sites.answered(AT_B)
                elsewhere = await sites.answered()
        for one in (*cut_off, *refused):
            assert one.error is not None
            assert one.error["code"] == "no_allowed_site", one
            assert one.error["param"] == "sites"
        assert all(map(Outcome.same_as, elsewhere, undisturbed))
        assert await sites.load("a", "requests") > before
