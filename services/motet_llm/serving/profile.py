"""Record a torch trace of a live engine, one engine step at a time, on the model's thread.

When a recording stops, torch holds Python's interpreter lock for microseconds per event. So each
step is a recording of its own, written before the next one begins: with many steps in one
recording, the worker would be silent for so long that its callers would take it for dead. The gaps
between the steps of a trace are the profiler's own time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from motet_kernels.runtime import native
from motet_llm.engine.engine import Engine
from motet_llm.engine.outputs import StepOutput
from motet_shared.errors import BadRequest, InternalError, Overloaded, Unavailable
from motet_shared.messages import Chunk, Profile
from motet_shared.wire.call import Call

from .trace_file import TraceFile

MAX_STEPS = 500
MAX_SECONDS = 300.0

Step = Callable[[], list[StepOutput]]


class Host(Protocol):
    """Require the parts of the engine's thread that a recording uses."""

    engine: Engine
    around_step: Callable[[Step], list[StepOutput]] | None

    def between_steps(self, command: Callable[[], None]) -> None: ...


class Profiler:
    """Serve `Profile` requests of one worker, one at a time: torch has one profiler per process."""

    def __init__(self) -> None:
        self._busy = False
        self._prepared = False

    async def serve(self, call: Call, request: Profile, host: Host) -> None:
        """Send the gzipped trace as `Chunk` items.

        Raises BadRequest for limits out of range, Overloaded while another recording runs, and
        Unavailable if the engine made no step.
        """
        check(request)
        if self._busy:
            raise Overloaded("a profile of this worker is being recorded already; wait for its end")
        recording = TraceRecording(request, host)
        self._busy = True
        try:
            await self._prepare()
            await _record(recording, host, request.seconds)
            for piece in recording.pieces():
                await call.send(Chunk(piece))
        finally:
            self._busy = False
            host.between_steps(recording.close)

    async def _prepare(self) -> None:
        """Start the profiler once, off the loop.

        The first recording of a process takes a second to start, which would hold up the engine.
        """
        if not self._prepared:
            await asyncio.to_thread(_record_nothing)
            self._prepared = True


def check(request: Profile) -> None:
    """Raise BadRequest for limits out of range."""
    if not 0 <= request.steps <= MAX_STEPS:
        raise BadRequest(
            f"steps={request.steps}: give 0 (by time alone) to {MAX_STEPS}", param="steps"
        )
    if not 0 < request.seconds <= MAX_SECONDS:  # NaN is refused too
        raise BadRequest(
            f"seconds={request.seconds:g}: give more than 0 and at most {MAX_SECONDS:g}",
            param="seconds",
        )


async def _record(recording: TraceRecording, host: Host, seconds: float) -> None:
    host.between_steps(recording.begin)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.shield(asyncio.wrap_future(recording.ended))
    finally:
        host.between_steps(recording.end)
    await asyncio.wrap_future(recording.ended)
    if recording.steps == 0:
        raise Unavailable(
            f"the engine made no step in {seconds:g} s; send requests while it is profiled"
        )


class TraceRecording:
    """Record the steps of one request.

    `ended` resolves when recording has stopped; then `pieces` gives the trace. The other methods
    run on the engine's thread, and raise nothing of their own there.
    """

    def __init__(self, request: Profile, host: Host):
        self.steps = 0
        self.ended: Future[None] = Future()
        self._request = request
        self._limit = request.steps or MAX_STEPS
        self._host = host
        self._file = TraceFile()

    def begin(self) -> None:
        if not self.ended.done():
            self._host.around_step = self._step

    def end(self) -> None:
        """Stop recording. Idempotent."""
        if self._host.around_step == self._step:
            self._host.around_step = None
        if not self.ended.done():
            self.ended.set_result(None)

    def _fail(self, error: Exception) -> None:
        self.ended.set_exception(
            InternalError(f"torch's profiler failed: {type(error).__name__}: {error}")
        )
        self.end()

    def _step(self, step: Step) -> list[StepOutput]:
        engine = self._host.engine
        if not engine.has_work:
            return step()
        recorded, mark = _profile(self._request), record_function(f"engine step {self.steps}")
        try:
            engine.in_model_thread(_start, recorded, mark)
        except Exception as error:
            self._fail(error)
            return step()
        with native.named_calls():
            outputs = step()
        self._stop(recorded, mark)
        return outputs

    def _stop(self, recorded: profile, mark: record_function) -> None:
        try:
            self._host.engine.in_model_thread(_end, recorded, mark)
            self._file.add(recorded)
        except Exception as error:
            self._fail(error)
            return
        self.steps += 1
        if self.steps == self._limit:
            self.end()

    def pieces(self) -> Iterator[bytes]:
        """Yield the gzipped trace in pieces."""
        return self._file.pieces()

    def close(self) -> None:
        """Delete the trace."""
        self._file.close()


def _start(recorded: profile, mark: record_function) -> None:
    recorded.start()
    mark.__enter__()


def _end(recorded: profile, mark: record_function) -> None:
    mark.__exit__(None, None, None)
    recorded.stop()


def _profile(request: Profile) -> profile:
    # Only the thread that starts it is recorded: torch cannot start or stop recording other threads
    # while they compute. Events are not read in Python, but torch needs them to assemble stacks.
    options = torch._C._profiler._ExperimentalConfig(trace_only=not request.stacks)
    supported = torch.profiler.supported_activities()
    return profile(
        activities=[
            activity
            for activity in (ProfilerActivity.CPU, ProfilerActivity.CUDA)
            if activity in supported
        ],
        record_shapes=request.shapes,
        with_stack=request.stacks,
        profile_memory=request.memory,
        experimental_config=options,
    )


def _record_nothing() -> None:
    with _profile(Profile(model="")):
        pass
