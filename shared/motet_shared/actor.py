"""An actor: one process, one bounded mailbox, one job; and `run`, which is the life of such a process.

    class Tokenizer(Actor):
        role = "tokenizer"

        @operation(Chat)
        async def chat(self, call: Call, request: Chat) -> None:
            await call.send(Text("hello", ids))
            call.finish("stop", usage)

    if __name__ == "__main__":
        run(Tokenizer, TokenizerConfig)

It crashes rather than limps: `crash(error)` ends the process with an exit code, and its supervisor starts a new one.
States: starting → warming → ready → draining → stopped; only `ready` takes new work.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, TypeVar

import uvloop

from . import telemetry
from .bus import Bus
from .call import Call
from .config import ProcessConfig, load
from .errors import ConfigError, MotetError, UnknownModel
from .messages import ModelCard, Request
from .starts import START, go_on, process_began

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Request)
Method = Callable[[Any, Call, R], Awaitable[None]]

EXIT_CONFIG = 78  # EX_CONFIG: a supervisor need not try again
EXIT_CRASH = 70  # EX_SOFTWARE


def operation(request: type[R]) -> Callable[[Method[R]], Method[R]]:
    """Mark a method as the handler of a request type. The type's tag is the operation's name in subjects."""

    def mark(method: Method[R]) -> Method[R]:
        method.__operation__ = str(request.__struct_config__.tag)  # type: ignore[attr-defined]
        return method

    return mark


class Actor:
    """Base of all services. Subclasses say what they serve, how they warm up and how they are."""

    role: ClassVar[str]
    max_active: int = 1024  # calls at a time; beyond it callers get Overloaded
    drain_timeout: float = 30.0

    def __init__(self, config: Any, bus: Bus):
        self.config = config
        self.bus = bus
        self.metrics: telemetry.Metrics | None = None
        self.leave = asyncio.Event()  # set when the process is to stop
        self.becomes: list[str] = []  # the command line that its process goes on with when it has stopped
        self.hurry = asyncio.Event()  # set when a drain has to end: what still runs goes elsewhere, or is cut off
        self._crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def warm(self) -> None:
        """Load what is needed before the first request."""

    async def close(self) -> None:
        """Release it again."""

    def load(self) -> dict[str, float]:
        """How loaded this instance is; travels in its heartbeats."""
        return {}

    def models(self) -> list[ModelCard]:
        """The models it serves; travels in its heartbeats."""
        return []

    def check_served(self, model: str) -> None:
        """UnknownModel unless it is one of `models`."""
        names = [card.name for card in self.models()]
        if model not in names:
            served = ", ".join(names) or "nothing yet"
            raise UnknownModel(f"model {model!r} is not served by {self.bus.instance}, which serves {served}")

    def stats(self) -> dict[str, Any]:
        """Numbers for people and tests: `$SRV.STATS` carries them as `data`."""
        return {}

    def described(self) -> dict[str, Any]:
        """`stats`, and the seconds of each stage of this process's start."""
        return self.stats() | ({"start_seconds": START.stages} if START.stages else {})

    def check_integrity(self) -> None:
        """Raises if the state of an idle actor is inconsistent."""
        self.bus.check_integrity()

    def integrity(self) -> str:
        """For `$SRV.STATS`: busy; or, of an actor that serves nobody, ok or what `check_integrity` has found."""
        if self.bus.calls.active or self.bus.caller.streams:
            return "busy"
        try:
            self.check_integrity()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "ok"

    def crash(self, error: BaseException) -> None:
        """End this process: the state can no longer be trusted."""
        if not self._crashed.done():
            self._crashed.set_exception(error)

    async def wait_crashed(self) -> None:
        """Raises what `crash` was given, whenever that happens."""
        await self._crashed

    def operations(self) -> dict[str, Callable[[Call, Any], Awaitable[None]]]:
        methods = (getattr(self, name) for name in dir(type(self)))
        return {m.__operation__: m for m in methods if callable(m) and hasattr(m, "__operation__")}

    async def start(self) -> None:
        """Subscribe, warm up, become ready."""
        self.bus.calls.max_active = self.max_active
        self.bus.describe = self.described
        self.bus.integrity = self.integrity
        self.bus.presence = lambda: (self.models(), self.load())
        self.bus.set_state("warming")
        await self.warm()
        START.mark("warm-up")
        await self.bus.serve(self.operations())
        self.bus.set_state("ready")
        START.mark("registered")
        START.end()
        told: dict[str, Any] = {"instance": self.bus.instance, **START.told()}
        log.info("ready", extra=told)

    async def stop(self) -> None:
        """Take no new work, finish what runs, release everything."""
        self.bus.set_state("draining")
        await self.bus.calls.drain(self.drain_timeout, self.hurry)
        await self.close()
        await self.bus.close()


def run(actor: type[Actor], config: type[ProcessConfig], argv: list[str] | None = None) -> None:
    """Run one actor until SIGTERM or SIGINT (drain, exit 0), a wrong setting (78) or a crash (70).

    A second signal ends the drain: calls that still run are told to go on elsewhere.
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
        code = EXIT_CONFIG
    sys.stderr.flush()
    # Threads of libraries may still run; nothing of theirs is worth waiting for.
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
        _collect_rarely()
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
    await actor.stop()
    telemetry.shutdown()
    if actor.becomes:
        os.environ.pop("MOTET_INSTANCE", None)  # every process has an instance id of its own
        go_on()
        os.execv(actor.becomes[0], actor.becomes)
    return 0


def _collect_rarely() -> None:
    """Leave what was loaded out of garbage collection from here on, and collect less often.

    Frames are short-lived lists that form no cycles, but at the default thresholds the collector would look for cycles
    among them several times per engine step, and now and then in everything that the libraries have loaded: a third
    of a second in a tokenizer, in which all its streams stand still.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _on_signals(first: asyncio.Event, second: asyncio.Event) -> asyncio.Event:
    def on_signal() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return first


async def _first(*work: Awaitable[Any]) -> None:
    """Run until one is done; its exception is raised, the others are cancelled."""
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
    """Have the kernel kill this process when its parent dies, however it dies (Linux: PR_SET_PDEATHSIG)."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        os._exit(0)
