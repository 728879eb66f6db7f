"""Serve vLLM as an engine: one `AsyncLLM`, whose processes are children of the host."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from motet_engines.config import EnginesConfig
from motet_engines.engine import CrashHandler, Features, Served, StepOutput
from motet_engines.grammars import added_tokens
from motet_engines.pictures import Picture
from motet_shared.errors import BadRequest, ConfigError, MotetError, Overloaded, Unavailable
from motet_shared.messages import Generate
from motet_shared.process.actor import die_with_parent

from .adapters import read_adapters
from .arguments import engine_arguments
from .library import Library, load_library
from .load import LoadReader
from .pictures import PictureInput, picture_features
from .sampling import sampling_params, step_output

log = logging.getLogger(__name__)

_SHUTDOWN = 5.0  # seconds that vLLM's processes have to end


class VllmEngine:
    """Drive one model in vLLM."""

    def __init__(self, config: EnginesConfig):
        self.features = Features(frames=True, prompt_logprobs=True)
        self._config = config
        self._library: Library | None = None
        self._engine: Any = None
        self._arguments: Any = None
        self._pictures: PictureInput | None = None
        self._tokens = added_tokens(Path(config.model))
        self._adapters = read_adapters(config.adapters, config.model_name)
        self._reader = LoadReader()
        # Loading takes minutes. vLLM's processes are forked from this thread and end with it, so it
        # stays for as long as the host.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._watch: asyncio.Task[None] | None = None

    async def start(self, on_health: Callable[[bool], None], on_crash: CrashHandler) -> Served:
        """Load the model. Raises ConfigError for arguments that vLLM refuses."""
        loop = asyncio.get_running_loop()
        self._engine = await loop.run_in_executor(self._thread, self._load)
        self._watch = asyncio.create_task(self._watch_engine(on_crash), name="engine-health")
        # Scores of a prompt would be those of its marks.
        seeing = picture_features(self._engine, replace(self.features, prompt_logprobs=False))
        self.features = replace(self.features, pictures=seeing)
        self._pictures = PictureInput(self._engine, self._config.max_picture)
        context = int(self._engine.model_config.max_model_len)
        return Served(context=context, adapters=tuple(self._adapters))

    def _load(self) -> Any:
        # vLLM's processes would outlive a host that is killed.
        os.register_at_fork(after_in_child=die_with_parent)
        self._library = library = load_library()
        self._arguments = engine_arguments(library, self._config, self._adapters.values())
        try:
            return library.async_llm.from_engine_args(
                self._arguments, stat_loggers=[self._reader.factory]
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(f"engine_args: vllm: {error}", param="engine_args") from error

    async def _watch_engine(self, on_crash: CrashHandler) -> None:
        while not self._engine.errored:  # noqa: ASYNC110  (vLLM tells it only so)
            await asyncio.sleep(self._config.engine_probe)
        on_crash(self._engine.dead_error)

    async def generate(
        self,
        key: str,
        request: Generate,
        expires: float | None,
        pictures: Sequence[Picture] = (),
    ) -> AsyncGenerator[StepOutput, None]:
        library = self._library
        if library is None or self._engine is None:
            raise Unavailable("vllm: has not started")
        try:
            prompt = {"type": "token", "prompt_token_ids": [*request.prompt, *request.output]}
            prompt_tokens = 0
            if pictures and self._pictures is not None:
                prompt, request, prompt_tokens = await self._pictures.render(request, pictures)
            found = self._engine.generate(
                prompt,
                sampling_params(library, request, self._tokens),
                key,
                lora_request=self._lora(library, request.model),
                priority=-request.priority,
            )
            async with aclosing(found) as outputs:
                async for output in outputs:
                    step = step_output(output, request)
                    step.prompt_tokens = prompt_tokens
                    yield step
        except MotetError:
            raise
        except library.dead as error:
            raise Unavailable(f"vllm has ended: {error}") from error
        except library.client_errors as error:
            raise BadRequest(f"vllm: {error}", param=getattr(error, "parameter", None)) from error
        except Exception as error:
            if type(error).__name__ in ("QueueOverflowError", "MaxQueuedTokensError"):
                raise Overloaded(f"vllm: {error}") from error
            raise

    def _lora(self, library: Library, model: str) -> Any:
        """Return vLLM's name for an adapter; None for the model itself."""
        found = self._adapters.get(model)
        return (
            None if found is None else library.lora_request(found.name, found.number, found.folder)
        )

    def load(self) -> dict[str, float]:
        return self._reader.load()

    def describe(self) -> dict[str, object]:
        arguments = self._arguments
        if arguments is None:
            return {}
        names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        return {"engine_route": "in process"} | {
            name: getattr(arguments, name, None) for name in names
        }

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._engine is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._engine.shutdown, _SHUTDOWN)
        self._thread.shutdown(wait=False)
