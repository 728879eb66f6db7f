"""Compile grammars of requests on separate threads, and cache them by their text.

No step waits for a grammar: a request enters the engine when its grammar is compiled.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from motet_shared import messages
from motet_shared.errors import (
    BadRequest,
    DeadlineExceeded,
    MotetError,
    Overloaded,
    UnsupportedParameter,
)
from motet_shared.process.fair_slots import FairSlots

from .grammar import Grammar, GrammarState
from .lark import describe
from .levels import STACK_BYTES
from .token_spelling import Spelling

THREADS = 3  # one tenant gets all but one, so that its slow grammars hold up no other tenant
# kind, text, frame, and the request's field, since errors name it
GrammarKey = tuple[str, str, str, str]


@dataclass(slots=True)
class GrammarCounts:
    """Count grammars since the start."""

    compiled: int = 0
    refused: int = 0
    seconds: float = 0.0
    hits: int = 0
    waiting: int = 0  # requests at present


@dataclass(slots=True, eq=False)
class _Compilation:
    """Hold a grammar that is compiled, is being compiled or waits for its turn.

    awaited_by: requests that await it. began_at: on the clock of `time.monotonic()`; None before
    its turn.
    """

    grammar: asyncio.Future[Grammar] = field(init=False)
    awaited_by: int = 0
    began_at: float | None = None


class GrammarCache:
    """Compile and cache grammars.

    `load` reads the spelling of the model's tokens; it is called on one of the threads when `prepare`
    is, and again if it failed for want of memory. timeout: seconds that a grammar may take to compile.
    capacity: compiled grammars that are kept, least recently used evicted first.
    """

    def __init__(self, load: Callable[[], Spelling], *, timeout: float, capacity: int):
        self._load = load
        self._timeout = timeout
        self._capacity = capacity
        self._pool: ThreadPoolExecutor | None = None
        self._slots = FairSlots(THREADS)
        self._spelling: Future[Spelling] | None = None
        self._cached: OrderedDict[GrammarKey, _Compilation] = OrderedDict()
        self._counts = GrammarCounts()

    def prepare(self) -> Future[Spelling]:
        """Begin to load the tokens' spelling, so that the first grammar need not wait for it.

        An error of loading is raised where the spelling is needed. What failed for want of memory, or of a file,
        is loaded again.
        """
        if self._spelling is None or _may_be_repeated(self._spelling):
            self._spelling = self._threads.submit(self._load)
        return self._spelling

    @property
    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = _start_threads()
        return self._pool

    def close(self) -> None:
        for compilation in list(self._cached.values()):
            compilation.grammar.cancel()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def grammar_state(
        self,
        constraint: messages.Grammar,
        output: Sequence[int] = (),
        deadline: float | None = None,
        tenant: str = "",
    ) -> GrammarState:
        """Return the grammar state of a reply at its beginning, or after `output`.

        A tenant compiles at most THREADS - 1 grammars at a time; more wait behind its own.
        `deadline` is on the clock of `time.monotonic()`. Raises BadRequest that names `wish.param`,
        DeadlineExceeded, or Overloaded if the grammar had no time to compile.
        """
        timeout = (
            self._timeout if deadline is None else min(self._timeout, deadline - time.monotonic())
        )
        compilation = self._compiled(constraint, tenant)
        self._counts.waiting += 1
        compilation.awaited_by += 1
        try:
            async with asyncio.timeout(max(timeout, 0)):
                grammar = await asyncio.shield(compilation.grammar)
                return await asyncio.wrap_future(self._threads.submit(grammar.start, output))
        except TimeoutError:
            raise self._timeout_error(constraint, compilation, timeout) from None
        except MotetError as error:
            raise _with_param(error, constraint) from None
        finally:
            self._counts.waiting -= 1
            compilation.awaited_by -= 1
            if not compilation.awaited_by and compilation.began_at is None:
                self._drop(_key(constraint), compilation)

    def _timeout_error(
        self, constraint: messages.Grammar, compilation: _Compilation, timeout: float
    ) -> MotetError:
        """Return the error of a request whose time is over.

        The grammar is to blame only if it has been compiling for most of that time.
        """
        if timeout < self._timeout:
            return DeadlineExceeded("the deadline passed before the grammar was compiled")
        began = compilation.began_at
        if (
            began is None
            or compilation.grammar.done()
            or time.monotonic() - began < self._timeout / 2
        ):
            message = (
                f"{describe(constraint)}: had no turn within {self._timeout:g} s; try again later"
            )
            return Overloaded(message, param=constraint.param or None)
        message = (
            f"{describe(constraint)}: does not compile within {self._timeout:g} s; simplify it"
        )
        return BadRequest(message, param=constraint.param or None)

    def _compiled(self, constraint: messages.Grammar, tenant: str) -> _Compilation:
        key = _key(constraint)
        compilation = self._cached.get(key)
        if compilation is not None:
            self._cached.move_to_end(key)
            self._counts.hits += 1
            return compilation
        compilation = _Compilation()
        compilation.grammar = asyncio.ensure_future(
            self._compile_in_turn(constraint, tenant, compilation)
        )
        self._cached[key] = compilation
        compilation.grammar.add_done_callback(lambda _: self._note(key, compilation))
        return compilation

    async def _compile_in_turn(
        self, constraint: messages.Grammar, tenant: str, compilation: _Compilation
    ) -> Grammar:
        async with self._slots.slot(tenant):
            spelling = await asyncio.shield(asyncio.wrap_future(self.prepare()))
            compilation.began_at = time.monotonic()
            job = self._threads.submit(self._compile, constraint, spelling)
            return await asyncio.wrap_future(job)

    def _compile(self, constraint: messages.Grammar, spelling: Spelling) -> Grammar:
        began = time.perf_counter()
        try:
            return Grammar(constraint, spelling)
        finally:
            self._counts.seconds += time.perf_counter() - began

    def _note(self, key: GrammarKey, compilation: _Compilation) -> None:
        """Count a compilation, and evict what exceeds the capacity.

        Refusals are not cached: the text may be long, and compiling it again gives the same answer.
        """
        if compilation.grammar.cancelled():
            self._forget(key, compilation)
            return
        if compilation.grammar.exception() is not None:
            self._counts.refused += 1
            self._forget(key, compilation)
            return
        self._counts.compiled += 1
        while len(self._cached) > self._capacity:
            self._cached.popitem(last=False)

    def _drop(self, key: GrammarKey, compilation: _Compilation) -> None:
        """Give up the turn of a grammar that no request awaits any longer."""
        compilation.grammar.cancel()
        self._forget(key, compilation)

    def _forget(self, key: GrammarKey, compilation: _Compilation) -> None:
        if self._cached.get(key) is compilation:  # else evicted, and perhaps begun anew
            del self._cached[key]

    def stats(self) -> dict[str, float]:
        """Return counts of compiled, refused, cached and awaited grammars, and compile seconds."""
        return {
            "grammars_compiled": self._counts.compiled,
            "grammars_refused": self._counts.refused,
            "grammar_seconds": self._counts.seconds,
            "grammar_hits": self._counts.hits,
            "grammars_waiting": self._counts.waiting,
        }


def _start_threads() -> ThreadPoolExecutor:
    """Return a pool whose threads are running, each with a stack of STACK_BYTES.

    One more than compile: grammars that are compiled already begin replies on it.
    """
    count = THREADS + 1
    pool = ThreadPoolExecutor(count, "motet-grammar")
    all_running = threading.Barrier(count + 1)
    before = threading.stack_size(STACK_BYTES)  # of the process: the pool's threads start now
    try:
        for _ in range(count):
            pool.submit(all_running.wait)
    except BaseException:
        all_running.abort()
        raise
    finally:
        threading.stack_size(before)
    all_running.wait()
    return pool


def _key(constraint: messages.Grammar) -> GrammarKey:
    return constraint.kind, constraint.text, constraint.frame, constraint.param


def _with_param(error: MotetError, constraint: messages.Grammar) -> MotetError:
    """Return the error with the request's field, where it is about the model and names none."""
    if isinstance(error, UnsupportedParameter) and error.param is None:
        return UnsupportedParameter(
            f"`{constraint.param or constraint.kind}`: {error.message}",
            param=constraint.param or None,
        )
    return error


def _may_be_repeated(loading: Future[Spelling]) -> bool:
    """Return True if loading has failed in a way that another try need not."""
    if not loading.done() or loading.cancelled():
        return False
    return isinstance(loading.exception(), MemoryError | OSError)
