"""Grammars of the requests of one worker: compiled on threads of their own, and kept by what they say.

No step waits for one: a request goes to the engine when its grammar is there.
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

from .grammar import Grammar, Sentence
from .grammar_text import shown
from .spelling import Spelling

THREADS = 2  # one that is slow is not to hold up the next
Name = tuple[str, str, str]  # the field too, since errors name it


@dataclass(slots=True)
class Counts:
    """Since the start."""

    compiled: int = 0
    refused: int = 0
    seconds: float = 0.0
    hits: int = 0
    waiting: int = 0  # requests, now


class Grammars:
    """`load` reads what the model's tokens spell; it is called once, on one of the threads, when `prepare` is.

    timeout: seconds that a grammar may take to compile. capacity: compiled ones that are kept, those used last.
    """

    def __init__(self, load: Callable[[], Spelling], *, timeout: float, capacity: int):
        self._load = load
        self._timeout = timeout
        self._capacity = capacity
        self._threads = ThreadPoolExecutor(THREADS, "motet-grammar")
        self._spelling: Future[Spelling] | None = None
        self._kept: OrderedDict[Name, asyncio.Future[Grammar]] = OrderedDict()
        self._counts = Counts()

    def prepare(self) -> Future[Spelling]:
        """Begin to load, so that the first grammar need not wait for it. It fails where it is needed."""
        if self._spelling is None:
            self._spelling = self._threads.submit(self._load)
        return self._spelling

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def sentence(
        self, wish: messages.Grammar, output: Sequence[int] = (), deadline: float | None = None
    ) -> Sentence:
        """Where a reply begins, or goes on after `output`. `deadline` is on the clock of `time.monotonic()`.

        Raises BadRequest that names `wish.param`, or DeadlineExceeded.
        """
        patience = self._timeout if deadline is None else min(self._timeout, deadline - time.monotonic())
        self._counts.waiting += 1
        try:
            async with asyncio.timeout(max(patience, 0)):
                grammar = await asyncio.shield(self._compiled(wish))
                return await asyncio.wrap_future(self._threads.submit(grammar.start, output))
        except TimeoutError:
            raise self._late(wish, patience) from None
        except MotetError as error:
            raise _named(error, wish) from None
        finally:
            self._counts.waiting -= 1

    def _late(self, wish: messages.Grammar, patience: float) -> MotetError:
        if patience < self._timeout:
            return DeadlineExceeded("the deadline passed before the grammar was compiled")
        message = f"{shown(wish)}: does not compile within {self._timeout:g} s; simplify it"
        return BadRequest(message, param=wish.param or None)

    def _compiled(self, wish: messages.Grammar) -> asyncio.Future[Grammar]:
        name = wish.kind, wish.text, wish.param
        future = self._kept.get(name)
        if future is not None:
            self._kept.move_to_end(name)
            self._counts.hits += 1
            return future
        future = asyncio.wrap_future(self._threads.submit(self._compile, wish, self.prepare()))
        self._kept[name] = future
        future.add_done_callback(lambda done: self._note(name, done))
        return future

    def _compile(self, wish: messages.Grammar, loading: Future[Spelling]) -> Grammar:
        spelling = loading.result(self._timeout)
        began = time.perf_counter()
        try:
            return Grammar(wish, spelling)
        finally:
            self._counts.seconds += time.perf_counter() - began

    def _note(self, name: Name, done: asyncio.Future[Grammar]) -> None:
        """A refusal is not kept: it may be too long, and another time says the same."""
        if done.cancelled() or done.exception() is not None:
            self._counts.refused += 1
            self._kept.pop(name, None)
            return
        self._counts.compiled += 1
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)

    def stats(self) -> dict[str, float]:
        """Grammars compiled and refused since the start, the seconds it took, those found compiled; requests that
        wait for one."""
        return {
            "grammars_compiled": self._counts.compiled,
            "grammars_refused": self._counts.refused,
            "grammar_seconds": self._counts.seconds,
            "grammar_hits": self._counts.hits,
            "grammars_waiting": self._counts.waiting,
        }


def _named(error: MotetError, wish: messages.Grammar) -> MotetError:
    """What is wrong with the model is said of the field too."""
    if isinstance(error, UnsupportedParameter) and error.param is None:
        return UnsupportedParameter(f"`{wish.param or wish.kind}`: {error.message}", param=wish.param or None)
    return error
