"""Signals to a prefill and a decode worker, as processes, while a prompt is on its way from one to the other."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from motet_cli.commands import role
from motet_cli.supervision.connection import NatsAccess
from motet_shared.errors import Unavailable
from motet_shared.messages import Generate, Sampling, Tokens
from motet_shared.testing import NatsServer
from motet_shared.wire.bus import Bus
from motet_shared.wire.stream import Stream
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.running.fork_server import ForkServer

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ENGINE = ("--threads", "1", "--deterministic", "--max-running", "8")
LOADED = ("motet_llm.service", "motet_llm.serving.prefill_service")
CONTEXT = 16384
PROMPT = [(7 * i * i + i) % 250 for i in range(CONTEXT - 16)]
LENGTH = 8  # of the reply, tokens
FREED_WITHIN = 10.0  # seconds: two are due, and machines that run tests are slow
HEARTBEAT = 0.5
PATIENT = 120.0

Reply = list[tuple[int, float]]  # tokens and their log-probabilities


@dataclass
class Workers:
    bus: Bus  # a tokenizer's
    pids: dict[str, int]  # by role

    def load(self, role: str) -> dict[str, float]:
        return next((beat.load for beat in self.bus.directory.instances(role)), {})

    def ask(self, instance: str | None = None, prompt: list[int] = PROMPT) -> Stream:
        sampling = Sampling(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=0)
        request = Generate(model="tiny", prompt=prompt, sampling=sampling)
        return self.bus.open("decode", request, instance=instance)

    async def answer(self, stream: Stream) -> tuple[Reply, dict[str, float]]:
        """And seconds by stage."""
        logprobs = [
            entry
            async for body in stream
            if isinstance(body, Tokens)
            for entry in body.logprobs or ()
        ]
        assert stream.end is not None
        return [(entry.id, entry.logprob) for entry in logprobs], stream.end.timing

    async def midway(self) -> None:
        """The prefill worker has computed some of the prompt, and the decode worker has stored some."""
        done = self.load("prefill")["tokens"]
        await self.until(
            lambda: (
                self.load("prefill")["tokens"] > done + 64 and self.load("decode")["kv_free"] < 1
            )
        )
        assert self.load("prefill")["tokens"] < done + len(PROMPT) - 1024, (
            "too few tokens for this machine"
        )

    async def meet(self, instance: str | None = None) -> None:
        """Until the decode worker has found one that prefills for it."""
        for number in range(200):
            async with self.ask(instance, [number, number + 1, number + 2]) as stream:
                _, timing = await self.answer(stream)
            if "decode.transfer" in timing:
                return
            await asyncio.sleep(HEARTBEAT / 5)
        raise TimeoutError("no prompt was handed over")

    async def ready(self, role: str, pid: int) -> str:
        """The id under which a process serves in a role."""

        def found() -> str | None:
            return next(
                (b.instance for b in self.bus.directory.ready(role, model="tiny") if b.pid == pid),
                None,
            )

        return str(await self.bus.directory.wait_for(lambda _: found(), PATIENT))

    async def until(self, condition: Callable[[], object], within: float = PATIENT) -> None:
        async with asyncio.timeout(within):
            while not condition():  # noqa: ASYNC110  # heartbeats change it
                await asyncio.sleep(0.02)

    def is_free(self, role: str) -> bool:
        load = self.load(role)
        return (load["kv_free"], load["running"], load["queued"]) == (1.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    path.mkdir()
    return tiny_checkpoint(
        "llama", path, hidden_size=32, head_dim=8, max_position_embeddings=CONTEXT
    )


@asynccontextmanager
async def workers(folder: Path, forks: ForkServer, *options: str) -> AsyncIterator[Workers]:
    """A decode worker that has all prompts computed by a prefill worker which takes its time."""
    model = (*ENGINE, "--model", str(folder))
    async with NatsServer() as nats:
        bus = await nats.bus("tokenizer")
        try:
            pids = {
                "prefill": await forks.start(
                    nats, "motet_llm", "--role", "prefill", *model, "--token-budget", "8"
                ),
                "decode": await forks.start(
                    nats, "motet_llm", *model, "--remote-prefill", "always", *options
                ),
            }
            made = Workers(bus, pids)
            for name, pid in pids.items():
                await made.ready(name, pid)
            if not options:
                await made.meet()
            yield made
        finally:
            await bus.close()


@pytest.fixture
async def forks() -> AsyncIterator[ForkServer]:
    async with ForkServer(*LOADED) as made:
        yield made


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.extended("storm"))],
)
async def test_a_lost_prefill_worker_costs_time_and_nothing_else(
    number: signal.Signals, folder: Path, forks: ForkServer
) -> None:
    async with workers(folder, forks) as made:
        async with made.ask() as stream:
            await made.midway()
            os.kill(made.pids["prefill"], number)
            moved, timing = await made.answer(stream)
        assert len(moved) == LENGTH
        assert timing["decode.transfer"] > 0
        async with (
            made.ask() as stream
        ):  # its beginning is cached, the rest is computed here: nobody else is there
            again, timing = await made.answer(stream)
        if number == signal.SIGSTOP:
            os.kill(made.pids["prefill"], signal.SIGCONT)
        assert again == moved
        assert "decode.transfer" not in timing
        await made.until(lambda: made.is_free("decode"))
    async with workers(folder, forks, "--remote-prefill", "never") as made, made.ask() as stream:
        assert (await made.answer(stream))[0] == moved


@pytest.mark.parametrize("how", ["killed", "cancelled"])
async def test_nobody_waits_for_a_decode_worker_that_is_gone(
    how: str, folder: Path, forks: ForkServer
) -> None:
    async with workers(folder, forks) as made:
        async with made.ask():
            await made.midway()
            if how == "killed":
                os.kill(made.pids["decode"], signal.SIGKILL)
                await made.until(lambda: made.is_free("prefill"), FREED_WITHIN)
        await made.until(lambda: made.is_free("prefill"), FREED_WITHIN)
        if how == "cancelled":
            await made.until(lambda: made.is_free("decode"), FREED_WITHIN)


async def test_a_worker_goes_on_in_another_role(folder: Path, forks: ForkServer) -> None:
    """One of two that decode prefills for the other, and decodes again; the process stays, with all its settings."""
    model = (*ENGINE, "--model", str(folder), "--remote-prefill", "always")
    async with NatsServer() as nats:
        stack = NatsAccess(nats.url, nats.passwords["operator"])
        bus = await nats.bus("tokenizer")
        try:
            pids = [await forks.start(nats, "motet_llm", *model, "--instance", "decode-one")]
            made = Workers(bus, {})
            one = await made.ready("decode", pids[0])
            assert one == "decode-one"
            with pytest.raises(Unavailable, match="only decode worker"):
                await role.change(stack, one, "prefill")
            pids.append(await forks.start(nats, "motet_llm", *model, "--instance", "decode-other"))
            other = await made.ready("decode", pids[1])
            await role.change(stack, one, "decode")  # as it is
            await role.change(stack, other, "prefill")
            prefill = await made.ready("prefill", pids[1])
            await made.meet(one)
            await role.change(stack, prefill, "decode")
            assert await made.ready("decode", pids[1]) != other
            assert not bus.directory.ready("prefill")
        finally:
            await bus.close()
