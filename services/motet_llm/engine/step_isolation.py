"""Compute the works of a failed step again in parts, so that only the request that fails it ends.

A step fails for all its works: model code raises on the input of one request, a grammar cannot be
followed, or memory is short. Its tokens are not appended, and keys and values are written once more
to the same slots, so halves of it can be computed as steps of their own, down to single works.

States of recurrent layers, and the queries that prompt compression records, cannot be computed
twice. Such a step is not retried: the process ends, and its requests move to another.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import torch

from motet_kernels.runtime.missing_memory import is_out_of_memory
from motet_llm.cache.block_tables import BlockTables
from motet_llm.scheduling.budget import SMALLEST_CHUNK
from motet_llm.scheduling.work import Work
from motet_shared.errors import InternalError, MotetError, Overloaded, model_error

from .counts import StepResult
from .forward_pass import Batch, ForwardPass
from .model_runner import ModelRunner
from .model_thread import ModelThread
from .request import Request

FRUITLESS_STEPS = 3  # failed steps in a row without a computed part, after which the engine ends


class StepIsolation:
    """Find the works that fail a step, and compute the others."""

    def __init__(
        self,
        runner: ModelRunner,
        tables: BlockTables,
        forward: ForwardPass,
        model_thread: ModelThread,
    ):
        self._runner, self._tables = runner, tables
        self._forward, self._model_thread = forward, model_thread
        self._steps = self._requests = 0
        self._fruitless, self._computed_steps = 0, 0

    def retry(
        self, batch: Batch, error: Exception, computed_steps: int
    ) -> tuple[list[tuple[Batch, StepResult]], dict[Request, MotetError]]:
        """Compute a step that failed with `error` in parts.

        Returns the parts with their results, and the requests that fail by themselves. Raises
        `error`, or what a part raises, if the state of the engine may be damaged: also where
        nothing can be computed any more.

        computed_steps: steps that the engine has computed since its start.
        """
        self._steps += 1
        results: list[tuple[Batch, StepResult]] = []
        failed: dict[Request, MotetError] = {}
        parts = self._parts_of(batch, error, failed)
        while parts:
            part = self._forward.prepare(parts.pop())
            try:
                part.mask.compute()
                results.append((part, self._model_thread.call(self._forward.compute, part)))
            except Exception as found:
                parts += self._parts_of(part, found, failed)
        if computed_steps != self._computed_steps or results:
            self._fruitless = 0
        self._computed_steps = computed_steps + len(results)
        self._fruitless += not results and not _is_too_large(batch, error)
        if self._fruitless >= FRUITLESS_STEPS:
            raise error
        return results, failed

    def _parts_of(
        self, batch: Batch, error: Exception, failed: dict[Request, MotetError]
    ) -> list[Sequence[Work]]:
        """Return the halves of a step; a single work goes to `failed` instead."""
        if not self._is_repeatable(batch, error):
            raise error
        self.free_memory(error)
        works, half = batch.works, len(batch.works) // 2
        if half:
            return [works[half:], works[:half]]
        (work,) = works
        self._requests += 1
        self._runner.scrub(self._tables.private_blocks(work.request))
        failed[work.request] = _failure(work, error)
        return []

    def _is_repeatable(self, batch: Batch, error: Exception) -> bool:
        """Return True if the failed step has left nothing behind that computing it again changes."""
        return self._runner.states is None and not batch.watched and self.is_survivable(error)

    def is_survivable(self, error: Exception) -> bool:
        """Return True if the engine can compute on after an error of model code.

        An error of a GPU other than missing memory leaves the process without its use.
        """
        if isinstance(error, InternalError):
            return False
        return is_out_of_memory(error) or not self._runner.on_gpu

    def free_memory(self, error: Exception) -> None:
        """Free what a computation that was short of memory still holds, before the next one.

        The frames that its error passed have the tensors of the whole forward pass as locals.
        """
        if not is_out_of_memory(error):
            return
        for one in _with_causes(error):
            traceback.clear_frames(one.__traceback__)
        if self._runner.on_gpu:
            torch.cuda.empty_cache()

    def stats(self) -> dict[str, float]:
        """Return the steps that failed, and the requests that failed them."""
        return {"failed_steps": self._steps, "isolated_requests": self._requests}


def _with_causes(error: BaseException) -> list[BaseException]:
    """Return an error, and those that it was raised from or while they were handled."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and one not in found:
            found.append(one)
            left += [one.__cause__, one.__context__]
    return found


def _is_too_large(batch: Batch, error: Exception) -> bool:
    """Return True if memory is short for one large work alone.

    That speaks against the request. The smallest chunk of a prompt fits unless the engine is broken.
    """
    return (
        is_out_of_memory(error)
        and len(batch.works) == 1
        and batch.works[0].num_tokens > SMALLEST_CHUNK
    )


def _failure(work: Work, error: Exception) -> MotetError:
    """Return the error of a request whose step fails although it is computed alone."""
    if is_out_of_memory(error):
        return Overloaded(
            f"memory: a step of {work.num_tokens} tokens does not fit beside what is in use; try"
            " again later, or with a shorter prompt"
        )
    if isinstance(error, MotetError):
        return error
    return model_error(error, f"the request ends after {work.request.num_output} output tokens")
