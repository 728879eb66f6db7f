"""Run an actor: one process with one bounded mailbox and one job.

    class Tokenizer(Actor):
        role = "tokenizer"

        @operation(Chat)
        async def chat(self, call: Call, request: Chat) -> None:
            await call.send(Text("hello", ids))
            call.finish("stop", usage)

    if __name__ == "__main__":
        run(Tokenizer, TokenizerConfig)

Actors fail fast: `crash(error)` ends the process with an exit code, and its supervisor starts a new
one. States: starting → warming → ready → draining → stopped; only `ready` takes new work. One
that is started before its model is wanted is `prepared` instead of `warming` (`memory_turn`).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any, ClassVar, TypeVar

import uvloop

from motet_shared.errors import ConfigError, MotetError, UnknownModel
from motet_shared.messages import ModelCard, Request
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_shared.wire.transport import NatsUnreachable

from . import telemetry
from .config import ProcessConfig, load
from .freed_memory import FreedMemory, return_freed, unmap_libraries
from .memory_turn import MemoryTurn, abandon_turns
from .starts import START, collect_rarely, go_on, process_began

log = logging.getLogger(__name__)

_NAMED_STREAMS = 4  # of an integrity's text
# Variables that a program which replaces this one must not have: it takes an instance id of its own,
# and its turn to take memory has come, at a gate that is not opened again.
_OF_THIS_START = ("MOTET_INSTANCE", "MOTET_MEMORY_GATE", "MOTET_WAIT_FOR_EXIT")

R = TypeVar("R", bound=Request)
Method = Callable[[Any, Call, R], Awaitable[None]]

EXIT_CONFIG = 78  # EX_CONFIG: a supervisor should not retry
EXIT_UNREACHABLE = 75  # EX_TEMPFAIL: no NATS server answers; a supervisor should retry
EXIT_CRASH = 70  # EX_SOFTWARE


def operation(request: type[R]) -> Callable[[Method[R]], Method[R]]:
    """Mark a method as the handler of a request type.

    The type's tag is the operation's name in subjects.
    """

    def mark(method: Method[R]) -> Method[R]:
        method.__operation__ = str(request.__struct_config__.tag)  # type: ignore[attr-defined]
        return method

    return mark


class Actor:
    """Base of all services; subclasses define operations, warm-up, models, load and statistics."""

    role: ClassVar[str]
    max_active: int = 1024  # maximum concurrent calls; further callers get Overloaded
    drain_timeout: float = 30.0

    def __init__(self, config: Any, bus: Bus):
        self.config = config
        self.bus = bus
        self.metrics: telemetry.Metrics | None = None
        self.leave = asyncio.Event()  # set when the process should stop
        self.becomes: list[str] = []  # command line to exec after the stop; empty: exit
        # set when a drain must end now: running calls fail over to other instances or are cut off
        self.hurry = asyncio.Event()
        self._crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait_for_memory(self) -> None:
        """Wait for this process's turn to take memory; called before `warm`."""
        exits = getattr(self.config, "wait_for_exit", ())  # tests give other configs
        gate = getattr(self.config, "memory_gate", None)
        if exits or gate:
            await asyncio.to_thread(MemoryTurn(gate, exits).wait)
            START.mark("memory")

    async def warm(self) -> None:
        """Load what is needed before the first request."""

    async def close(self) -> None:
        """Release what `warm` has loaded."""

    def load(self) -> dict[str, float]:
        """Return the load of this instance, which its heartbeats carry."""
        return {}

    def models(self) -> list[ModelCard]:
        """Return the models that this instance serves, which its heartbeats carry."""
        return []

    def check_served(self, model: str) -> None:
        """Raise UnknownModel unless `model` is one of `models`."""
        names = [card.name for card in self.models()]
        if model not in names:
            served = ", ".join(names) or "nothing yet"
            raise UnknownModel(
                f"model: {model!r} is not served by {self.bus.instance}, which serves {served}",
                param="model",
            )

    def stats(self) -> dict[str, Any]:
        """Return statistics for operators and tests; `$SRV.STATS` carries them as `data`."""
        return {}

    def described(self) -> dict[str, Any]:
        """Return `stats` and the seconds of each stage of this process's start."""
        return self.stats() | ({"start_seconds": START.stages} if START.stages else {})

    def check_integrity(self) -> None:
        """Raise an exception if the state of an idle actor is inconsistent."""
        self.bus.check_integrity()

    def integrity(self) -> str:
        """Return the integrity for `$SRV.STATS`.

        The result is "busy" with active calls or open streams, followed by what some of them are, else "ok" or
        the error of `check_integrity`.
        """
        if self.bus.calls.active or self.bus.caller.streams:
            streams = islice(self.bus.caller.streams.values(), _NAMED_STREAMS)
            return " ".join(("busy", *map(str, streams)))
        try:
            self.check_integrity()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "ok"

    def crash(self, error: BaseException) -> None:
        """End this process because its state can no longer be trusted."""
        if not self._crashed.done():
            self._crashed.set_exception(error)

    async def wait_crashed(self) -> None:
        """Wait for `crash` and raise the exception that it was given."""
        await asyncio.shield(self._crashed)  # the end of one wait must not settle it

    def operations(self) -> dict[str, Callable[[Call, Any], Awaitable[None]]]:
        """Return the handlers of all methods marked with `operation`, by the operation's name."""
        methods = (getattr(self, name) for name in dir(type(self)))
        return {m.__operation__: m for m in methods if callable(m) and hasattr(m, "__operation__")}

    async def start(self) -> None:
        """Subscribe, warm up and become ready."""
        self.bus.calls.max_active = self.max_active
        self.bus.describe = self.described
        self.bus.integrity = self.integrity
        self.bus.presence = lambda: (self.models(), self.load())
        is_prepared = getattr(self.config, "memory_gate", None) is not None
        self.bus.set_state("prepared" if is_prepared else "warming")
        await self.wait_for_memory()
        await self.warm()
        START.mark("warm-up")
        await self.bus.serve(self.operations())
        self.bus.set_state("ready")
        START.mark("registered")
        START.end()
        told: dict[str, Any] = {"instance": self.bus.instance, **START.told()}
        log.info("ready", extra=told)

    async def stop(self) -> None:
        """Refuse new work, finish running calls, and release everything."""
        self.bus.set_state("draining")
        given = getattr(self.config, "drain_timeout", None)  # tests give other configs
        await self.bus.calls.drain(self.drain_timeout if given is None else given, self.hurry)
        await self.close()
        await self.bus.close()


def run(actor: type[Actor], config: type[ProcessConfig], argv: list[str] | None = None) -> None:
    """Run one actor until it ends, and exit the process.

    Exit codes: 0 after a drain on SIGTERM or SIGINT, 78 for a wrong setting, 75 if no NATS server
    answers, 70 for a crash. A second signal ends the drain: calls that still run fail over to other instances.
    """
    START.begin(process_began())
    START.mark("imports")
    try:
        settings = load(config, argv, prog=f"motet-{actor.role}")
        if settings.stop_with_parent:
            die_with_parent()
        code = uvloop.run(_live(actor, settings))
    except ConfigError as error:
        print(f"motet-{actor.role}: {error.message}", file=sys.stderr, flush=True)
        code = EXIT_UNREACHABLE if isinstance(error, NatsUnreachable) else EXIT_CONFIG
    sys.stderr.flush()
    # Threads of libraries may still run; do not wait for them.
    os._exit(code)


async def _live(actor_class: type[Actor], config: ProcessConfig) -> int:
    instance = config.instance_id(actor_class.role)
    metrics = telemetry.setup(actor_class.role, instance, config)
    bus = await Bus.connect(instance, config)
    START.mark("connected")
    actor = actor_class(config, bus)
    actor.metrics = metrics
    metrics.watch(lambda: bus.stats() | actor.described())
    if (port := metrics.serve(config.metrics_port, config.metrics_host)) >= 0:
        log.info("metrics on http://%s:%d/metrics", config.metrics_host, port)
    stopping = _on_signals(actor.leave, actor.hurry)
    try:
        await _first(actor.start(), stopping.wait())
        collect_rarely()
        return_freed()
        unmap_libraries()
        bus.monitor.duties.append(FreedMemory(lambda: bus.is_busy).check)
        await _first(actor.wait_crashed(), stopping.wait())
    except ConfigError:
        await bus.close()
        raise
    except MotetError as error:
        log.critical("crashed: %s", error.message)
        return EXIT_CRASH
    except Exception:
        log.critical("crashed", exc_info=True)
        return EXIT_CRASH
    try:
        await _first(actor.stop(), actor.wait_crashed())
    except Exception:
        log.critical("crashed while it drained", exc_info=True)
        sys.stderr.flush()
        os._exit(EXIT_CRASH)  # a thread that hangs would keep the loop from closing
    telemetry.shutdown()
    if actor.becomes:
        for name in _OF_THIS_START:
            os.environ.pop(name, None)
        go_on()
        os.execv(actor.becomes[0], actor.becomes)
    return 0


def _on_signals(first: asyncio.Event, second: asyncio.Event) -> asyncio.Event:
    def on_signal() -> None:
        abandon_turns()
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return first


async def _first(*work: Awaitable[Any]) -> None:
    """Run until one awaitable is done; raise its exception and cancel the others."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies (Linux: PR_SET_PDEATHSIG)."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        os._exit(0)
