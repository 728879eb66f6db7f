"""Run a workload against a server and report the results: `motet bench`."""

from __future__ import annotations

import asyncio
import itertools
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import uvloop

from motet_cli.bench import progress
from motet_cli.bench.config import BenchConfig, configure
from motet_cli.bench.exchange import exchange
from motet_cli.bench.http import Client
from motet_cli.bench.load import LoadGenerator, Measured
from motet_cli.bench.probe import measure_tokens_per_word, pick_model
from motet_cli.bench.request import KINDS, PATHS, Request, Shape
from motet_cli.bench.results import plot, report, table
from motet_cli.bench.results.record import Record
from motet_cli.bench.results.summary import summarize
from motet_cli.bench.tokens_per_word import TokensPerWord
from motet_cli.commands.server import read_key


def run(args: Namespace) -> int:
    """Run a benchmark and print its results.

    Returns exit code 0 if a reply was complete, 1 if none was, 130 after Ctrl-C; the figures until
    then are printed.
    """
    config = configure(args)
    started = datetime.now(UTC)
    bench = Bench(config, Client(config.base, read_key(config.api_key_file)))
    measured = uvloop.run(bench.run())
    summary = summarize(
        measured, config.limits, config.price_per_hour, paced=config.concurrency is None
    )
    title = (
        f"{bench.shape.model} at {config.base}, {bench.load_text()}, seed {config.workload.seed}"
    )
    table.show(summary, title)
    if config.json is not None:
        report.write(config.json, config, bench.shape, bench.scale, started, summary, measured)
    if config.plot is not None:
        plot.draw(measured, config.limits, title, config.plot)
    if measured.interrupted:
        return 130
    return 0 if summary.completed else 1


class Bench:
    """Run a benchmark: probe the server, warm up, measure.

    shape: request fields, with the model once it is determined.
    scale: tokens per word of the server's tokenizer, once measured.
    """

    def __init__(self, config: BenchConfig, client: Client):
        self.config = config
        self.client = client
        self.shape = Shape(
            endpoint=config.endpoint,
            model="",
            temperature=config.temperature,
            extra=dict(config.extra),
        )
        self.scale = TokensPerWord(config.tokens_per_word or 1.0)

    async def run(self) -> Measured:
        config = self.config
        try:
            kind = KINDS[config.endpoint]
            model = await pick_model(self.client, config.base, config.model, kind)
            self.shape = Shape(
                endpoint=config.endpoint,
                model=model,
                temperature=config.temperature,
                extra=dict(config.extra),
            )
            if config.tokens_per_word is None and config.endpoint != "speech":
                self.scale = (
                    await measure_tokens_per_word(self.client, self.shape, config.timeout)
                    or self.scale
                )
            await self._warm_up()
            return await self._measure()
        finally:
            self.client.close()

    def requests(self) -> Iterator[Request]:
        """Return the measured requests.

        They are generated beforehand if their number is known, so that no time of the
        measurement is spent on generating them.
        """
        config = self.config
        if config.trace is not None:
            return iter(config.trace.requests(self.scale, config.speed)[: config.requests])
        made: Iterator[Request] = itertools.islice(
            config.workload.requests(self.scale), config.requests
        )
        if config.concurrency is None and (seconds := config.duration) is not None:
            made = itertools.takewhile(lambda request: request.arrival < seconds, made)
        elif config.requests is None:
            return made
        return iter(list(made))

    def load_text(self) -> str:
        config = self.config
        if config.trace is not None:
            return f"trace {config.trace.path.name}"
        if config.concurrency is not None:
            return f"{config.concurrency} at a time"
        return f"{config.workload.process} {config.workload.rate:g} requests/s"

    async def _warm_up(self) -> None:
        count = self.config.warmup
        if count:
            made = itertools.islice(self.config.workload.requests(self.scale, "warm-up"), count)
            await LoadGenerator(
                self._send, concurrency=min(count, self.config.concurrency or 1)
            ).run(made)

    async def _measure(self) -> Measured:
        load = LoadGenerator(
            self._send, concurrency=self.config.concurrency, duration=self.config.duration
        )
        requests = self.requests()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, load.stop)
        try:
            with progress.shown(load, self.config.requests):
                return await load.run(requests)
        finally:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    async def _send(self, request: Request, record: Record, now: Callable[[], float]) -> None:
        body, path = self.shape.body(request), PATHS[self.shape.endpoint]
        spoken = self.shape.endpoint == "speech"
        timeout = self.config.timeout
        await exchange(self.client, path, body, record, now, timeout, spoken=spoken)
