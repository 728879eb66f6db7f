"""Load the pipeline of a folder with diffusers, or refuse it with the cause."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from motet_diffusion.config import EngineConfig
from motet_kernels.runtime.device import find_device
from motet_models.checkpoints import check_checkpoint
from motet_models.processors import without_videos
from motet_shared.errors import ConfigError

from .quantized import load_gguf
from .support import DENOISERS, is_video, pipeline_class, refusal

_TOKENIZER = "tokenizer_config.json"


def load(config: EngineConfig) -> Any:
    """Return the pipeline of a folder, as diffusers loads it. Raises ConfigError with the cause."""
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    name = json.loads((Path(config.model) / "model_index.json").read_text()).get("_class_name", "")
    if (kind := pipeline_class(str(name))) is None:
        raise ConfigError(f"model={config.model!r}: diffusers has no pipeline called {name!r}")
    if (cause := refusal(kind)) is not None:
        raise refused(config, kind.__name__, cause)
    diffusers_logging.set_verbosity_error()
    for progress in (diffusers_logging, transformers_logging):
        progress.disable_progress_bar()
    for part in (Path(config.model), *sorted(Path(config.model).iterdir())):
        if part.is_dir():
            check_checkpoint(part)
    folder = Path(config.model)
    tokenizers = lone_tokenizers(folder)
    parts = missing_parts(folder) | processors(folder) | dict.fromkeys(tokenizers)
    if config.denoiser:
        parts |= denoiser_of_file(config)
    load_folder = functools.partial(
        DiffusionPipeline.from_pretrained,
        Path(config.model),
        dtype=getattr(torch, config.dtype),
        local_files_only=True,
        use_safetensors=True,
        **parts,
    )
    try:
        pipeline = read(load_folder)
    except Exception as error:  # whatever diffusers raises for a folder is the cause of its refusal
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model={config.model!r}: diffusers does not load it: {cause}") from None
    for name, tokenizer in tokenizers.items():
        setattr(pipeline, name, tokenizer)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(find_device(config.device, ConfigError))


def read(load_folder: Callable[..., Any]) -> Any:
    """Return the pipeline that diffusers loads, in the one of its two ways that the model allows."""
    try:
        return load_folder(low_cpu_mem_usage=False)
    except ValueError as error:
        # Models that keep parts in float32, as Kandinsky 5, are read in the other way only.
        if "low_cpu_mem_usage" not in str(error):
            raise
        return load_folder(low_cpu_mem_usage=True)


def denoiser_of_file(config: EngineConfig) -> dict[str, Any]:
    """Return the denoiser with the weights of the GGUF file, by the name of its part."""
    import diffusers

    index = json.loads((Path(config.model) / "model_index.json").read_text())
    for name in DENOISERS:
        library, kind = index.get(name) or (None, None)
        if library == "diffusers" and inspect.isclass(found := getattr(diffusers, str(kind), None)):
            dtype = getattr(torch, config.dtype)
            folder = Path(config.model) / name
            return {name: load_gguf(found, Path(config.denoiser), folder, dtype)}
    raise ConfigError(f"denoiser={config.denoiser!r}: {config.model!r} has no denoiser to replace")


def missing_parts(folder: Path) -> dict[str, Any]:
    """Return the parts that a folder declares missing, such as the largest text encoder of SD3.

    diffusers requires them as explicit arguments.
    """
    index = json.loads((folder / "model_index.json").read_text())
    return {name: None for name, kind in index.items() if kind == [None, None]}


def processors(folder: Path) -> dict[str, Any]:
    """Return the processors of pictures and text, without their parts for videos, by name.

    Qwen-Image's editing has one. diffusers would load them whole, which needs torchvision.
    """
    import transformers
    from transformers.processing_utils import MODALITY_TO_AUTOPROCESSOR_MAPPING

    found = {}
    for name, kind in json.loads((folder / "model_index.json").read_text()).items():
        if not isinstance(kind, list) or kind[0] != "transformers":
            continue
        whole = getattr(transformers, str(kind[1]), None)
        if inspect.isclass(whole) and issubclass(whole, transformers.ProcessorMixin):
            found[name] = without_videos(whole, MODALITY_TO_AUTOPROCESSOR_MAPPING).from_pretrained(
                folder / name, local_files_only=True, trust_remote_code=False
            )
    return found


def lone_tokenizers(folder: Path) -> dict[str, Any]:
    """Return the tokenizers of processors that transformers has with torchvision only, by name.

    Flux.2 [dev] has one, for its text alone: the images that it changes do not go through it.
    """
    import transformers

    found = {}
    for name, kind in json.loads((folder / "model_index.json").read_text()).items():
        if not isinstance(kind, list) or kind[0] != "transformers":
            continue
        whole = getattr(transformers, str(kind[1]), None)
        is_processor = inspect.isclass(whole) and issubclass(whole, transformers.ProcessorMixin)
        is_named = str(kind[1]).endswith("Processor") and name == "tokenizer"
        if is_named and not is_processor and (folder / name / _TOKENIZER).is_file():
            found[name] = transformers.AutoTokenizer.from_pretrained(
                folder / name, local_files_only=True, trust_remote_code=False
            )
    return found


def refused(config: EngineConfig, kind: str, cause: str) -> ConfigError:
    """Return the error for a pipeline that is not served."""
    found = pipeline_class(kind)
    page = "videos" if found is not None and is_video(found) else "pictures"
    return ConfigError(
        f"model={config.model!r}: {kind} is not supported: {cause}; docs/{page}.md lists others"
    )
