"""Serialize a picture in progress: latents, generator, and what its loop remembers of earlier steps.

That is a scheduler's memory, and the momentum of a guider.

A checkpoint is resumed by running the pipeline's loop again with zero answers up to its step, which
costs only the scheduler's arithmetic, and by replacing the resulting tensors with those stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Generator, Tensor

from motet_shared.errors import BadRequest

_LATENTS = "latents"
_GENERATOR = "generator"


def pack(
    latents: Tensor, generator: Generator, memories: Mapping[str, Any], fixed: dict[str, Any]
) -> bytes:
    """Return the state as safetensors.

    memories: objects that change from step to step, by name. fixed: their tensors before the first
    step; those that are still the same are left out.
    """
    tensors = {_LATENTS: latents, _GENERATOR: generator.get_state()}
    tensors |= {
        name: value
        for name, value in memory_tensors(memories).items()
        if value is not fixed.get(name)
    }
    return save(
        {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    )


def unpack(data: bytes, like: Tensor, generator: Generator, memories: Mapping[str, Any]) -> Tensor:
    """Return the latents, and restore the state of the generator and of `memories`.

    Raises BadRequest if `data` is no checkpoint of this picture.
    """
    try:
        tensors = load(data)
        latents = tensors.pop(_LATENTS)
        generator.set_state(tensors.pop(_GENERATOR))
        if latents.shape != like.shape:
            raise ValueError(f"latents of shape {tuple(latents.shape)}, not {tuple(like.shape)}")
        for name, value in tensors.items():
            memory, _, attribute = name.partition(".")
            _put(memories[memory], attribute, value.to(like.device))
    except (
        SafetensorError,
        KeyError,
        ValueError,
        TypeError,
        RuntimeError,
        IndexError,
        AttributeError,
    ) as error:
        raise BadRequest(
            f"resume: is no checkpoint of this picture ({error}); draw it anew", param="resume"
        ) from None
    return latents.to(like)


def memory_tensors(memories: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of all memories, by `memory.attribute`."""
    return {
        f"{name}.{attribute}": value
        for name, memory in memories.items()
        for attribute, value in _tensors(memory).items()
    }


def _tensors(memory: Any) -> dict[str, Tensor]:
    """Return all tensors that an object holds, by attribute; those in lists as `name.index`."""
    found: dict[str, Tensor] = {}
    for name, value in vars(memory).items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, list):
            found |= {
                f"{name}.{i}": entry for i, entry in enumerate(value) if isinstance(entry, Tensor)
            }
    return found


def _put(memory: Any, name: str, value: Tensor) -> None:
    attribute, dot, index = name.partition(".")
    if attribute not in vars(memory):
        raise KeyError(name)
    if dot:
        vars(memory)[attribute][int(index)] = value
    else:
        setattr(memory, attribute, value)
