"""Serialize a picture in progress: latents, generator, and the scheduler's memory of earlier steps.

A checkpoint is resumed by running the pipeline's loop again with zero answers up to its step, which
costs only the scheduler's arithmetic, and by replacing the resulting tensors with those stored.
"""

from __future__ import annotations

from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Generator, Tensor

from motet_shared.errors import BadRequest

_LATENTS = "latents"
_GENERATOR = "generator"
_MEMORY = "scheduler."


def pack(latents: Tensor, generator: Generator, scheduler: Any, fixed: dict[str, Any]) -> bytes:
    """Return the state as safetensors.

    `fixed`: the scheduler's tensors before the first step; those that are still the same are left
    out.
    """
    tensors = {_LATENTS: latents, _GENERATOR: generator.get_state()}
    tensors |= {
        _MEMORY + name: value
        for name, value in _memory(scheduler).items()
        if value is not fixed.get(name)
    }
    return save(
        {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    )


def unpack(data: bytes, like: Tensor, generator: Generator, scheduler: Any) -> Tensor:
    """Return the latents, and restore the state of generator and scheduler.

    Raises BadRequest if `data` is no checkpoint of this picture.
    """
    try:
        tensors = load(data)
        latents = tensors.pop(_LATENTS)
        generator.set_state(tensors.pop(_GENERATOR))
        if latents.shape != like.shape:
            raise ValueError(f"latents of shape {tuple(latents.shape)}, not {tuple(like.shape)}")
        for name, value in tensors.items():
            _put(scheduler, name.removeprefix(_MEMORY), value.to(like.device))
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


def scheduler_tensors(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's tensors before its first step, to pass to `pack` as `fixed`."""
    return _memory(scheduler)


def _memory(scheduler: Any) -> dict[str, Tensor]:
    """Return all tensors that a scheduler holds, by attribute; those in lists as `name.index`."""
    found: dict[str, Tensor] = {}
    for name, value in vars(scheduler).items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, list):
            found |= {
                f"{name}.{i}": entry for i, entry in enumerate(value) if isinstance(entry, Tensor)
            }
    return found


def _put(scheduler: Any, name: str, value: Tensor) -> None:
    attribute, dot, index = name.partition(".")
    if attribute not in vars(scheduler):
        raise KeyError(name)
    if dot:
        vars(scheduler)[attribute][int(index)] = value
    else:
        setattr(scheduler, attribute, value)
