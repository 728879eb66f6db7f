"""A picture that is half done, as bytes: latents, the generator, and what the scheduler remembers of earlier steps.

A checkpoint is taken up by running the pipeline's loop anew with empty answers up to its step, which costs nothing but
the scheduler's arithmetic, and by putting these tensors in the place of what came of that.
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
    """`fixed`: the scheduler's attributes before the first step; tensors that are still the same are left out."""
    tensors = {_LATENTS: latents, _GENERATOR: generator.get_state()}
    tensors |= {_MEMORY + name: value for name, value in _memory(scheduler).items() if value is not fixed.get(name)}
    return save({name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()})


def unpack(data: bytes, like: Tensor, generator: Generator, scheduler: Any) -> Tensor:
    """The latents; generator and scheduler go on where they were. BadRequest if it is no checkpoint of this picture."""
    try:
        tensors = load(data)
        latents = tensors.pop(_LATENTS)
        generator.set_state(tensors.pop(_GENERATOR))
        if latents.shape != like.shape:
            raise ValueError(f"latents of shape {tuple(latents.shape)}, not {tuple(like.shape)}")
        for name, value in tensors.items():
            _put(scheduler, name.removeprefix(_MEMORY), value.to(like.device))
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, IndexError, AttributeError) as error:
        raise BadRequest(f"resume: is no checkpoint of this picture ({error}); draw it anew", param="resume") from None
    return latents.to(like)


def memory_before(scheduler: Any) -> dict[str, Any]:
    """What `pack` wants to know of a scheduler that has made no step."""
    return _memory(scheduler)


def _memory(scheduler: Any) -> dict[str, Tensor]:
    """All tensors that a scheduler holds, by attribute; those in lists as `name.index`."""
    found: dict[str, Tensor] = {}
    for name, value in vars(scheduler).items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, list):
            found |= {f"{name}.{i}": entry for i, entry in enumerate(value) if isinstance(entry, Tensor)}
    return found


def _put(scheduler: Any, name: str, value: Tensor) -> None:
    attribute, dot, index = name.partition(".")
    if attribute not in vars(scheduler):
        raise KeyError(name)
    if dot:
        vars(scheduler)[attribute][int(index)] = value
    else:
        setattr(scheduler, attribute, value)
