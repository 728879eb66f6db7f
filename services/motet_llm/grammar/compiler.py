"""Compile grammars of requests on separate threads, and cache them by their text.

No step waits for a grammar: a request enters the engine when its grammar is compiled.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from motet_shared import messages
from motet_shared.errors import BadRequest, DeadlineExceeded, MotetError, UnsupportedParameter
from motet_shared.process.fair_slots import FairSlots

from .grammar import Grammar, GrammarState
from .lark import describe
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
        self._threads = ThreadPoolExecutor(THREADS, "motet-grammar")
        self._slots = FairSlots(THREADS)
        self._spelling: Future[Spelling] | None = None
        self._cached: OrderedDict[GrammarKey, asyncio.Future[Grammar]] = OrderedDict()
        self._counts = GrammarCounts()

    def prepare(self) -> Future[Spelling]:
        """Begin to load the tokens' spelling, so that the first grammar need not wait for it.

        An error of loading is raised where the spelling is needed. What failed for want of memory, or of a file,
        is loaded again.
        """
        if self._spelling is None or _may_be_repeated(self._spelling):
            self._spelling = self._threads.submit(self._load)
        return self._spelling

    def close(self) -> None:
        for future in list(self._cached.values()):
            future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

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
        or DeadlineExceeded.
        """
        timeout = (
            self._timeout if deadline is None else min(self._timeout, deadline - time.monotonic())
        )
        self._counts.waiting += 1
        try:
            async with asyncio.timeout(max(timeout, 0)):
                grammar = await asyncio.shield(self._compiled(constraint, tenant))
                return await asyncio.wrap_future(self._threads.submit(grammar.start, output))
        except TimeoutError:
            raise self._timeout_error(constraint, timeout) from None
        except MotetError as error:
            raise _with_param(error, constraint) from None
        finally:
            self._counts.waiting -= 1

    def _timeout_error(self, constraint: messages.Grammar, timeout: float) -> MotetError:
        if timeout < self._timeout:
            return DeadlineExceeded("the deadline passed before the grammar was compiled")
        message = (
            f"{describe(constraint)}: does not compile within {self._timeout:g} s; simplify it"
        )
        return BadRequest(message, param=constraint.param or None)

    def _compiled(self, constraint: messages.Grammar, tenant: str) -> asyncio.Future[Grammar]:
        name = constraint.kind, constraint.text, constraint.frame, constraint.param
        future = self._cached.get(name)
        if future is not None:
            self._cached.move_to_end(name)
            self._counts.hits += 1
            return future
        future = asyncio.ensure_future(self._compile_in_turn(constraint, tenant))
        self._cached[name] = future
        future.add_done_callback(lambda done: self._note(name, done))
        return future

    async def _compile_in_turn(self, constraint: messages.Grammar, tenant: str) -> Grammar:
        async with self._slots.slot(tenant):
            job = self._threads.submit(self._compile, constraint, self.prepare())
            return await asyncio.wrap_future(job)

    def _compile(self, constraint: messages.Grammar, loading: Future[Spelling]) -> Grammar:
        spelling = loading.result(self._timeout)
        began = time.perf_counter()
        try:
            return Grammar(constraint, spelling)
        finally:
            self._counts.seconds += time.perf_counter() - began

    def _note(self, name: GrammarKey, done: asyncio.Future[Grammar]) -> None:
        """Count a compilation, and evict what exceeds the capacity.

        Refusals are not cached: the text may be long, and compiling it again gives the same answer.
        """
        if done.cancelled() or done.exception() is not None:
            self._counts.refused += 1
            self._cached.pop(name, None)
            return
        self._counts.compiled += 1
        while len(self._cached) > self._capacity:
            self._cached.popitem(last=False)

    def stats(self) -> dict[str, float]:
        """Return counts of compiled, refused, cached and awaited grammars, and compile seconds."""
        return {
            "grammars_compiled": self._counts.compiled,
            "grammars_refused": self._counts.refused,
            "grammar_seconds": self._counts.seconds,
            "grammar_hits": self._counts.hits,
            "grammars_waiting": self._counts.waiting,
        }


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
