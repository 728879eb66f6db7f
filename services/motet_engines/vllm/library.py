"""Load vLLM's classes, which only the engine's own environment has."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from motet_shared.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Library:
    """Hold the classes of vLLM that the host uses, of vLLM 0.11 and later.

    client_errors: exceptions by which vLLM refuses a request. dead: the engine has ended.
    """

    async_llm: Any
    engine_args: Any
    argument_parser: Any
    sampling_params: Any
    structured_outputs: Any
    lora_request: Any
    delta: Any
    client_errors: tuple[type[Exception], ...]
    dead: type[Exception]


def load_library() -> Library:
    """Import vLLM, which takes many seconds. Raises ConfigError where it is not installed."""
    try:
        sampling = import_module("vllm.sampling_params")
        arguments = import_module("vllm.engine.arg_utils")
        engine = import_module("vllm.v1.engine.async_llm")
        failures = import_module("vllm.v1.engine.exceptions")
        lora = import_module("vllm.lora.request")
    except ImportError as error:
        raise ConfigError(
            f"engine='vllm': {error}; give --engine-python of an environment that has vLLM",
            param="engine_python",
        ) from None
    return Library(
        async_llm=engine.AsyncLLM,
        engine_args=arguments.AsyncEngineArgs,
        argument_parser=_argument_parser(),
        sampling_params=sampling.SamplingParams,
        structured_outputs=sampling.StructuredOutputsParams,
        lora_request=lora.LoRARequest,
        delta=sampling.RequestOutputKind.DELTA,
        client_errors=(ValueError, *_client_errors()),
        dead=failures.EngineDeadError,
    )


def _argument_parser() -> Any:
    """Return the class of vLLM's parser of arguments, which has moved between releases."""
    for name in ("vllm.utils.argparse_utils", "vllm.utils"):
        found = getattr(import_module(name), "FlexibleArgumentParser", None)
        if found is not None:
            return found
    raise ConfigError("engine='vllm': this release is not supported; install vLLM 0.11 or later")


def _client_errors() -> tuple[type[Exception], ...]:
    try:
        module = import_module("vllm.exceptions")
    except ImportError:
        return ()
    found = getattr(module, "VLLMClientError", None)
    return () if found is None else (found,)
