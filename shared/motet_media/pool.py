"""Share a few decoding children among all callers that decode one kind of media.

A child is started when it is first needed, kept for further jobs, and replaced when it was
killed, crashed or has served `_JOBS` jobs. There are at most `size` children; further jobs
wait.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from motet_shared.errors import BadRequest, Cancelled, PayloadTooLarge

from . import wire
from .worker import ChildDied, Data, JobLimits, JobRefused, Result, Worker

SIZE = max(2, min(4, os.cpu_count() or 1))
_JOBS = 500  # jobs per child: its leaks and leftover client data end with it
_CANCEL_CHECK = 0.1  # seconds between checks whether a waiting job was cancelled
_DECODERS = {kind: f"motet_media.{kind}" for kind in ("sound", "picture", "video")}
R = TypeVar("R")

# The kernel kills children when the thread that started them ends (prctl(2), PR_SET_PDEATHSIG), so
# one thread starts all of them and lives as long as the process.
_starter = ThreadPoolExecutor(1, thread_name_prefix="media-start")
_threads = ThreadPoolExecutor(4 * SIZE, thread_name_prefix="media")


class Scope:
    """Track the child that works for an asyncio task, to kill it when the task is cancelled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self.cancelled = False

    def hold(self, worker: Worker | None) -> None:
        """Set the working child; raise Cancelled if the task was cancelled."""
        with self._lock:
            self._worker = worker
            if self.cancelled:
                raise Cancelled("the client has disconnected; decoding of its file ends")

    def release(self) -> None:
        """Clear the working child while it waits for its consumer.

        Its generator ends it if the consumer stops.
        """
        with self._lock:
            self._worker = None

    def cancel(self) -> None:
        """Kill the working child, and refuse all further work."""
        with self._lock:
            self.cancelled = True
            if self._worker is not None:
                self._worker.kill()


_scope: contextvars.ContextVar[Scope] = contextvars.ContextVar("media_scope")


class Pool:
    """Run tasks of one decoder module in child processes. Thread-safe."""

    def __init__(self, module: str, size: int = SIZE):
        self._module, self._size = module, size
        self._idle: list[Worker] = []
        self._workers: set[Worker] = set()
        self._starting = 0
        self._free = threading.Condition()
        self.killed = 0

    def run(
        self,
        task: str,
        data: Data,
        limits: JobLimits,
        refuse: Callable[[str], BadRequest],
        **args: wire.Value,
    ) -> Generator[Result, None, None]:
        """Yield (meta, payload) of a task. Blocks: run it on a thread.

        Memory is bounded: the child waits for the consumer. Raises the decoder's BadRequest, or one
        made by `refuse` from a reason if the child broke a limit or crashed. Raises Cancelled if
        the task that runs this in `decoding` was cancelled. Closing the generator early kills the
        child.
        """
        scope = _scope.get(None) or Scope()
        worker, complete = self._acquire(scope), False
        try:
            results = worker.run(task, data, limits, args)
            while True:
                # A generator may continue within another call of `decoding`.
                current = _scope.get(None) or scope
                current.hold(worker)
                try:
                    result = next(results, None)
                finally:
                    current.release()
                if result is None:
                    break
                yield result
            complete = True
        except JobRefused as error:
            complete = error.refusal.code not in ("memory", "crash")
            raise _error(error.refusal, limits, refuse) from None
        except (ChildDied, TimeoutError) as error:
            (_scope.get(None) or scope).hold(None)  # raises Cancelled if that is the cause
            raise refuse(_reason(error, limits)) from None
        finally:
            self._release(worker, complete and worker.jobs < _JOBS)

    def close(self) -> None:
        """End all children; busy ones are released by the threads that wait for them."""
        with self._free:
            idle, self._idle = self._idle, []
            busy = self._workers.difference(idle)
            self._workers.clear()
        for worker in busy:
            worker.kill()
        for worker in idle:
            worker.close()

    def stats(self) -> dict[str, int]:
        """Return the number of children, and how many were killed."""
        with self._free:
            return {"decoders": len(self._workers), "decoders_killed": self.killed}

    def confinement(self) -> dict[str, bool]:
        """Return the protections that the system granted to the children, by name.

        Starts a child if there is none.
        """
        worker = self._acquire(Scope())
        try:
            return worker.confinement
        finally:
            self._release(worker, True)

    def _acquire(self, scope: Scope) -> Worker:
        with self._free:
            while True:
                scope.hold(None)
                while self._idle:
                    worker = self._idle.pop()
                    if worker.alive:
                        return worker
                    self._workers.discard(worker)
                    worker.close()
                if len(self._workers) + self._starting < self._size:
                    self._starting += 1
                    break
                self._free.wait(_CANCEL_CHECK)
        return self._begin()

    def _begin(self) -> Worker:
        try:
            worker = _starter.submit(Worker, self._module).result()
            worker.wait_ready()
        except BaseException:
            with self._free:
                self._starting -= 1
                self._free.notify()
            raise
        with self._free:
            self._starting -= 1
            self._workers.add(worker)
        return worker

    def _release(self, worker: Worker, complete: bool) -> None:
        with self._free:
            keep = complete and worker in self._workers
            if keep:
                self._idle.append(worker)
            else:
                self._workers.discard(worker)
                self.killed += 1
            self._free.notify()
        if not keep:
            worker.close()


_pools: dict[str, Pool] = {}
_pools_lock = threading.Lock()


def pool(kind: str) -> Pool:
    """Return this process's pool for "sound", "picture" or "video"."""
    with _pools_lock:
        if kind not in _pools:
            _pools[kind] = Pool(_DECODERS[kind])
        return _pools[kind]


@atexit.register
def close_pools() -> None:
    """End the children of all pools; they are started again on demand."""
    with _pools_lock:
        for one in _pools.values():
            one.close()


async def decoding(
    function: Callable[..., R],
    *args: Any,
    executor: ThreadPoolExecutor | None = None,
    **kwargs: Any,
) -> R:
    """Run a decoding function on a thread (of `executor`); on cancellation, kill its child."""
    scope, context = Scope(), contextvars.copy_context()
    context.run(_scope.set, scope)
    call = asyncio.get_running_loop().run_in_executor(
        executor or _threads, lambda: context.run(function, *args, **kwargs)
    )
    try:
        return await call
    except asyncio.CancelledError:
        scope.cancel()
        raise


def _error(
    refusal: wire.Refusal, limits: JobLimits, refuse: Callable[[str], BadRequest]
) -> BadRequest:
    if refusal.code == "memory":
        return refuse(f"decoding it takes more than {limits.memory >> 20} MB of memory")
    if refusal.code == "crash":
        return refuse(f"its decoder failed ({refusal.message})")
    kind = PayloadTooLarge if refusal.code == PayloadTooLarge.code else BadRequest
    return kind(refusal.message, param=refusal.param)


def _reason(error: Exception, limits: JobLimits) -> str:
    if isinstance(error, TimeoutError):
        return f"decoding takes longer than {limits.wall:g} s"
    if str(error) == "cpu":
        return f"decoding it takes more than {limits.cpu:g} s of processor time"
    return str(error)
